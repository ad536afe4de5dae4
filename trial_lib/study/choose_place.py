"""The place of a study's trials: this host, the hosts of a hostfile, or a Ray cluster."""

import importlib.util
import signal
import threading
from dataclasses import replace

from trial_lib.device.base import Host
from trial_lib.device.this_host import kind_of, this_host
from trial_lib.inputs.read_experiment import Experiment
from trial_lib.launch.device_watch import company_now
from trial_lib.launch.hosts import HostfileStarter, spanned
from trial_lib.launch.locks import host_lock_dir
from trial_lib.launch.place import Note, Place
from trial_lib.launch.rank_starter import RankStarter
from trial_lib.launch.starters import ColdStarter, WarmStarter
from trial_lib.messages.errors import InputError
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.limits import supposed_ops
from trial_lib.study.program import environment_of, interpreter_of, leading_imports_of
from trial_lib.study.typed_command import devices_of


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
    from trial_lib.launch import ray_cluster

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
        from trial_lib.launch.ray_cluster import connect

        connect(address)
    finally:
        # Ray installs its own handler of SIGTERM, and the study would miss its cancellation.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def starter_of(experiment: Experiment, arguments: StudyArguments, host: Host, log: str, note: Note) -> RankStarter:
    """The starter of trials on this host, or on all hosts of a hostfile. It starts in the background.

    `log` is the path of the fork server's own output. `note` is called with a sentence when something takes long.
    """
    interpreter = interpreter_of(experiment)
    environment = environment_of(experiment, arguments.include, host.device)
    builders, ahead = _ops(experiment, arguments, host.device)
    environment |= kind_of(host.device).primed_with(host, experiment.config.resources.slots_per_trial)
    hosts = experiment.config.resources.hosts
    if hosts:
        return HostfileStarter(hosts, interpreter, builders, environment, note, ahead)
    if arguments.start == "cold":
        return ColdStarter(interpreter, builders, environment, note, ahead)
    leading = leading_imports_of(experiment, environment)
    starter = WarmStarter(interpreter, builders, environment, log, note, ahead, leading)
    starter.start()
    return starter


def cluster_of(experiment: Experiment, arguments: StudyArguments, host: Host, study_id: str, note: Note) -> Place:
    """The cluster that this process is connected to. The starters of its hosts start in the background."""
    from trial_lib.launch.ray_cluster import RayPlace, share_of
    from trial_lib.launch.ray_host import HostSetup

    environment = environment_of(experiment, arguments.include, host.device)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    builders, ahead = _ops(experiment, arguments, host.device)
    setup = HostSetup(
        study_id=study_id,
        interpreter=interpreter_of(experiment),
        builders=builders,
        # Its hosts do not say which ops the profile trial needed.
        ahead=[*builders, *ahead],
        environment=environment,
        is_warm=arguments.start == "warm",
        lock_dir=host_lock_dir(),
    )
    resource = kind_of(host.device).resource
    share = share_of(experiment.config.resources.slots_per_trial, resource, experiment.source)
    note(f"trials ask the Ray cluster for {resource}s: {share.slots} on each of {share.hosts} host(s)")
    return RayPlace(setup, share)


def _ops(experiment: Experiment, arguments: StudyArguments, device: str) -> tuple[list[str], list[str]]:
    """Returns the operators that a fork server loads for its forks if they are built, and others that trials may need.

    On a GPU a fork server can load none.
    """
    ops = supposed_ops(experiment, arguments, device)
    return (ops, []) if kind_of(device).computes_on_the_processor else ([], ops)
