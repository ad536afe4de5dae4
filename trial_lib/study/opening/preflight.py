"""Checks before a study, or a full experiment, has a folder."""

from collections.abc import Sequence
from pathlib import Path

from trial_lib.device.host.base import Host
from trial_lib.device.host.this_host import kind_of
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.slots.lock_dir import host_lock_dir, own_folder
from trial_lib.wire.errors import InputError


def check_slots(experiment: Experiment, host: Host) -> None:
    """Checks that this host has enough slots for an experiment, and that they can be locked.

    Raises:
        InputError: it has not, or they cannot.
    """
    own_folder(host_lock_dir())
    slots = experiment.config.resources.slots_per_trial
    if slots > len(host.slots):
        if experiment.config.follow_launcher:
            raise InputError(
                f"it starts {slots} ranks, but there are {len(host.slots)} {host.device} slot(s) for it.",
                where=experiment.source,
                remedy="Ask the launcher for fewer.",
            )
        raise InputError(
            f"slots_per_trial is {slots}, but this host has {len(host.slots)} {host.device} slot(s).",
            where=experiment.source,
            remedy=f"Set resources.slots_per_trial to at most {len(host.slots)}.",
        )
    refusal = kind_of(host.device).refusal(host, slots)
    if refusal is not None:
        raise InputError(
            refusal,
            where=experiment.source,
            remedy="Start one rank." if experiment.config.follow_launcher else "Set resources.slots_per_trial to 1.",
        )


def check_include(include: Sequence[Path]) -> None:
    """Checks that the files and folders to include exist.

    Raises:
        InputError: one does not.
    """
    for path in include:
        if not path.exists():
            raise InputError(
                "this does not exist.", where=f"--include {path}", remedy="Name an existing file or folder."
            )


def check_length(experiment: Experiment) -> None:
    """Checks that a trial class has a length to train at full length.

    Raises:
        InputError: it has none.
    """
    if experiment.entrypoint.trial_class is not None and experiment.config.searcher.max_length is None:
        raise InputError(
            "searcher.max_length is missing, and a full experiment of a trial class trains that long.",
            where=experiment.source,
            remedy="Add `searcher: {max_length: {batches: 1000}}`, or so many epochs or records.",
        )
