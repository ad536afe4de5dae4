"""What the folders of studies and of full experiments have in common, and what is checked before there is one."""

import logging
import os
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from trial_lib.experiment.environment import redact
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.files import write_whole
from trial_lib.experiment.yaml_file import Experiment
from trial_lib.launch.hardware import Host


def new_id(name: str) -> str:
    """Returns an id for a study or a full experiment of that name: unique, and fit for a folder's name."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "study"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def keep_experiment(experiment: Experiment, whole: Path, shown: Path) -> None:
    """Keeps the YAML as it is, for this user alone, and without its secrets, for everybody who sees the folder.

    Args:
        experiment: what was submitted.
        whole: where the YAML goes as it is.
        shown: where it goes without the values that look like secrets.
    """
    text = experiment.path.read_text(encoding="utf-8")
    whole.touch(mode=0o600)
    whole.write_text(text, encoding="utf-8")
    variables = experiment.environment_variables
    for name, replacement in redact(variables).items():
        if replacement != variables[name] and variables[name]:
            text = text.replace(variables[name], replacement)
    write_whole(shown, text)


def file_logger(name: str, path: Path) -> logging.Logger:
    """Returns a logger that writes to a file; whoever shows it to people adds a handler."""
    logger = logging.Logger(name, logging.DEBUG)
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(file)
    return logger


def hold_lock(path: Path, what: str) -> FileLock:
    """Returns the lock of a folder's one driver, held.

    Args:
        path: the lock.
        what: `study`, say.

    Raises:
        InputError: another process has it.
    """
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another process drives this {what}.", where=str(path.parent), remedy="Wait for it, or stop it first."
        ) from None
    return lock


def host_lock_dir() -> Path:
    """Returns where the locks of slots and ports stand: of this host and this boot, like what they hand out."""
    return Path("/tmp") / f"zerotune-{os.getuid()}"


def check_slots(experiment: Experiment, host: Host) -> None:
    """Refuses an experiment that this host has too few slots for.

    Raises:
        InputError: it has.
    """
    slots = experiment.config.resources.slots_per_trial
    if slots > len(host.slots):
        raise InputError(
            f"slots_per_trial is {slots}, but this host has {len(host.slots)} {host.device} slot(s).",
            where=str(experiment.path),
            remedy=f"Set resources.slots_per_trial to at most {len(host.slots)}.",
        )


def check_include(include: Sequence[Path]) -> None:
    """Refuses something to include that does not exist.

    Raises:
        InputError: it does not.
    """
    for path in include:
        if not path.exists():
            raise InputError(
                "this does not exist.", where=f"--include {path}", remedy="Name an existing file or folder."
            )


def check_length(experiment: Experiment) -> None:
    """Refuses a trial class that is to be trained at full length and does not say how long that is.

    Raises:
        InputError: it does not.
    """
    if experiment.entrypoint.trial_class is not None and experiment.config.searcher.max_length is None:
        raise InputError(
            "searcher.max_length is missing, and a full experiment of a trial class trains that long.",
            where=str(experiment.path),
            remedy="Add `searcher: {max_length: {batches: 1000}}`, or so many epochs or records.",
        )
