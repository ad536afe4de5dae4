"""The setup of a study: everything that stays as it is while it runs, read and checked before it has a folder."""

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import kind_of, this_host
from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, keep_secret, known_here
from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.launch.device_watch import company_now
from zerotune.trial_lib.launch.hosts import HostfileStarter, spanned
from zerotune.trial_lib.launch.locks import host_lock_dir, own_folder
from zerotune.trial_lib.launch.starters import ColdStarter, WarmStarter
from zerotune.trial_lib.launch.trial import Place
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import STUDIES, StudyPaths
from zerotune.trial_lib.records.switches import place_of
from zerotune.trial_lib.search.methods import METHODS, Method
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.folder import new_id
from zerotune.trial_lib.study.followed import Followed, followed
from zerotune.trial_lib.study.program import environment_of, interpreter_of, leading_imports_of
from zerotune.trial_lib.study.typed_command import devices_of, read_command

_SERVERS = 1  # cores that the servers take, which start beside the profile trial


@dataclass(frozen=True)
class StudySetup:
    """Everything that stays as it is while a study runs."""

    study_id: str  # unique over all studies
    opened_at: float  # seconds since the epoch. A trial never changes a user's file that is older.
    experiment: Experiment  # the experiment that the user submitted
    arguments: StudyArguments  # the study's arguments, as the user gave them
    paths: StudyPaths  # the study's files
    host: Host  # the devices
    environment: dict[str, str]  # the environment variables that ranks start from

    @classmethod
    def now(
        cls,
        study_id: str,
        opened_at: float,
        experiment: Experiment,
        arguments: StudyArguments,
        paths: StudyPaths,
        host: Host,
    ) -> "StudySetup":
        """Takes the environment of this moment. Prefect and MLflow change this process's later."""
        environment = environment_of(experiment, arguments.include, host.device)
        return cls(study_id, opened_at, experiment, arguments, paths, host, environment)

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return self.host.device

    @property
    def method(self) -> Method:
        return METHODS[self.arguments.method]

    @property
    def slots(self) -> int:
        return self.experiment.config.resources.slots_per_trial

    @property
    def free_switches(self) -> tuple[str, ...]:
        """Places of the program's switches that may change the training, as the user says."""
        return tuple(place_of(request.path) for request in self.experiment.requests if request.changes_mathematics)

    @property
    def concurrency(self) -> int:
        slots = self.arguments.max_slots or len(self.host.slots)
        return max(1, min(self.arguments.max_concurrent_trials, self.arguments.max_trials, slots // self.slots))

    @property
    def memory_limit(self) -> int | None:
        """The memory budget of a slot, in bytes. None leaves a trial all the memory of its GPU."""
        asked = self.experiment.config.resources.memory_per_slot
        return kind_of(self.device).budget(self.host, None if asked is None else int(asked))


def new_setup(
    arguments: StudyArguments,
    work_dir: Path,
    tell: Callable[[str], None] = lambda sentence: None,
    check: Callable[[], None] = lambda: None,
) -> StudySetup:
    """The setup of a new study below `work_dir`. Nothing of it has been started or written.

    If the command is a wrapper, the study is of the command that the wrapper starts. `tell` gets a sentence when
    something takes long. `check` is called repeatedly meanwhile, and its error ends the waiting. Raises InputError if
    the arguments, the experiment or this host do not fit.
    """
    found = Followed(arguments.command, arguments.model_dir)
    if arguments.command:
        found = followed(arguments.command, arguments.model_dir, tell, check, arguments.arg_mappings.values())
        arguments = arguments.model_copy(update={"command": found.words, "model_dir": found.folder})
    include = arguments.include
    if arguments.config_path is not None:
        experiment = read_experiment(arguments.config_path, arguments.model_dir, include=include)
    else:
        mappings, vary = arguments.arg_mappings, arguments.vary
        experiment = read_command(
            arguments.command, mappings, arguments.model_dir, this_host(), include, vary, found.wrapper
        )
    host = slots_for(experiment, arguments.ray_address, arguments.run_full_experiment)
    check_arguments(arguments, experiment, host)
    words = (*found.wrapper, *arguments.command)
    keep_secret(KnownSecrets.of_experiment(experiment) + KnownSecrets.within({"command": words}))
    experiment = replace(experiment, notes=(*found.notes, *experiment.notes, *host.notes))
    study_id = new_id(known_here().hide(experiment.name))
    paths = StudyPaths((work_dir / STUDIES / study_id).absolute())
    return StudySetup.now(study_id, time.time(), experiment, arguments, paths, host)


def kept_setup(
    study_id: str, arguments: StudyArguments, paths: StudyPaths, wrapper: Sequence[str], ds_config: dict[str, Any]
) -> StudySetup:
    """The setup of a study that has its folder. Raises InputError if the experiment or this host does not fit."""
    keep_secret(KnownSecrets.of_study(paths))
    experiment = read_experiment(paths.experiment, arguments.model_dir, include=arguments.include, wrapper=wrapper)
    if experiment.ds_config != ds_config:
        raise InputError(
            "the DeepSpeed configuration has changed since the study began.",
            where=str(experiment.model_dir),
            remedy="Put it back, or start a new study.",
        )
    host = slots_for(experiment, arguments.ray_address, arguments.run_full_experiment)
    check_arguments(arguments, experiment, host)
    experiment = replace(experiment, notes=(*experiment.notes, *host.notes))
    return StudySetup.now(study_id, time.time(), experiment, arguments, paths, host)


# The slots of trials, what starts their ranks there, and checks before a study, or a full experiment, has a folder.


def slots_for(experiment: Experiment, ray_address: str | None = None, trains: bool = False) -> Host:
    """The slots of trials: on this host, on all hosts that one trial spans, or on a whole cluster.

    Raises InputError if the experiment names devices that do not exist, or there is no such cluster.
    """
    hosts, entrypoint = experiment.config.resources.hosts, experiment.entrypoint
    if ray_address is None:
        host = devices_of(entrypoint, this_host())
        if hosts:
            return spanned(host, hosts, experiment.source)
        host = kind_of(host.device).alike(host, experiment.config.resources.slots_per_trial)
        return replace(host, notes=(*host.notes, *company_now(host)))
    if hosts or entrypoint.devices is not None or entrypoint.excluded_devices:
        raise InputError(
            "the experiment names hosts or devices for its trials, but with --ray Ray chooses them.",
            where=experiment.source,
            remedy="Leave one of the two out.",
        )
    if trains:
        raise InputError(
            "a full experiment runs on one host, or on those of a hostfile, and not on a Ray cluster.",
            where="--run-full-experiment",
            remedy="Leave it out, and train by the command in best_command.txt.",
        )
    connect_to_ray(ray_address)
    from zerotune.trial_lib.launch import ray_cluster

    resource = ray_cluster.kind_of_slots()
    ray_cluster.share_of(experiment.config.resources.slots_per_trial, resource, experiment.source)
    return ray_cluster.slots_of_all_nodes(resource)


def connect_to_ray(address: str) -> None:
    """Connects this process to a Ray cluster, unless it is connected. Raises InputError if there is none, or no Ray."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("prefect_ray") is None:
        raise InputError(
            "Ray, or Prefect's integration for it, is not installed.",
            where=f"--ray {address}",
            remedy="Type `pip install '.[ray]'` in ZeroTune's repository, on every host.",
        )
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        # Other studies do not need Ray.
        from zerotune.trial_lib.launch.ray_cluster import connect

        connect(address)
    finally:
        # Ray installs its own handler of SIGTERM, and the study would miss its cancellation.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def starter_of(
    setup: StudySetup, ops: Sequence[str], note: Callable[[str], None]
) -> ColdStarter | WarmStarter | HostfileStarter:
    """The starter of trials on this host, or on all hosts of a hostfile. It starts in the background.

    `ops` are the operators that trials may need. `note` is called with a sentence when something takes long.
    """
    interpreter = interpreter_of(setup.experiment)
    builders, ahead = _loaded_ops(setup, ops)
    environment = {**setup.environment, **kind_of(setup.device).primed_with(setup.host, setup.slots)}
    hosts = setup.experiment.config.resources.hosts
    if hosts:
        return HostfileStarter(hosts, interpreter, builders, environment, note, ahead)
    if setup.arguments.start == "cold":
        return ColdStarter(interpreter, builders, environment, note, ahead)
    leading = leading_imports_of(setup.experiment, environment)
    log = str(setup.paths.fork_server_log)
    starter = WarmStarter(interpreter, builders, environment, log, note, ahead, leading)
    starter.start()
    return starter


def cluster_of(setup: StudySetup, ops: Sequence[str], note: Callable[[str], None]) -> Place:
    """The Ray cluster that this process is connected to. The starters of its hosts start in the background."""
    from zerotune.trial_lib.launch.ray_cluster import RayPlace, share_of
    from zerotune.trial_lib.launch.ray_host import HostSetup

    builders, ahead = _loaded_ops(setup, ops)
    on_host = HostSetup(
        study_id=setup.study_id,
        interpreter=interpreter_of(setup.experiment),
        builders=builders,
        # Its hosts do not say which ops the profile trial needed.
        ahead=[*builders, *ahead],
        environment={name: value for name, value in setup.environment.items() if name != "CUDA_VISIBLE_DEVICES"},
        is_warm=setup.arguments.start == "warm",
        lock_dir=host_lock_dir(),
    )
    resource = kind_of(setup.device).resource
    share = share_of(setup.slots, resource, setup.experiment.source)
    note(f"trials ask the Ray cluster for {resource}s: {share.slots} on each of {share.hosts} host(s)")
    return RayPlace(on_host, share)


def _loaded_ops(setup: StudySetup, ops: Sequence[str]) -> tuple[list[str], list[str]]:
    # The operators that a fork server loads for its forks if they are built, and the others. On a GPU it loads none.
    return (list(ops), []) if kind_of(setup.device).computes_on_the_processor else ([], list(ops))


def is_measured_beside(setup: StudySetup) -> bool:
    """Whether the profile trial may measure time, because the host has cores to spare."""
    if setup.arguments.ray_address is not None or setup.experiment.config.resources.hosts:
        return False
    on_the_processor = kind_of(setup.device).computes_on_the_processor
    cores = len(setup.host.slots) if on_the_processor else len(os.sched_getaffinity(0))
    return cores >= setup.slots + _SERVERS


def check_slots(experiment: Experiment, host: Host) -> None:
    """Raises InputError if this host has too few slots for an experiment, or they cannot be locked."""
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
    """Raises InputError if a file or folder to include does not exist."""
    for path in include:
        if not path.exists():
            raise InputError(
                "this does not exist.", where=f"--include {path}", remedy="Name an existing file or folder."
            )


def check_length(experiment: Experiment) -> None:
    """Raises InputError if a trial class has no length to train at full length."""
    if experiment.entrypoint.trial_class is not None and experiment.config.searcher.max_length is None:
        raise InputError(
            "searcher.max_length is missing, and a full experiment of a trial class trains that long.",
            where=experiment.source,
            remedy="Add `searcher: {max_length: {batches: 1000}}`, or so many epochs or records.",
        )


def check_arguments(arguments: StudyArguments, experiment: Experiment, host: Host) -> None:
    """Raises InputError if the arguments do not fit this host or each other."""
    slots = experiment.config.resources.slots_per_trial
    check_slots(experiment, host)
    if arguments.max_slots is not None and not slots <= arguments.max_slots <= len(host.slots):
        raise InputError(
            f"{arguments.max_slots} is not between one trial's slots ({slots}) and this host's ({len(host.slots)}).",
            where="--max-slots",
            remedy="Leave it out to use the whole host.",
        )
    if arguments.max_trials < 2:
        raise InputError(
            f"{arguments.max_trials} trial leaves none for the search: the profile trial counts.",
            where="--max-trials",
            remedy="Allow at least 2.",
        )
    check_include(arguments.include)
    if arguments.run_full_experiment:
        check_length(experiment)
