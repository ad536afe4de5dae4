"""Where a study's trials run: this host, the hosts that one trial spans, or those of a Ray cluster."""

import importlib.util
import signal
import threading
from dataclasses import replace

from trial_lib.device.host.base import Host
from trial_lib.device.host.this_host import kind_of, this_host
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.launch.cold import ColdStarter
from trial_lib.launch.device_watch import company_now
from trial_lib.launch.hosts.hosts import spanned
from trial_lib.launch.hosts.starter import HostfileStarter
from trial_lib.launch.place import Note, Place
from trial_lib.launch.rank_starter import RankStarter
from trial_lib.launch.warm import WarmStarter
from trial_lib.slots.lock_dir import host_lock_dir
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.build_program import environment_of, interpreter_of
from trial_lib.study.opening.needed_ops import supposed_ops
from trial_lib.study.opening.typed_command import devices_of
from trial_lib.wire.errors import InputError


def slots_for(experiment: Experiment, ray_address: str | None = None, trains: bool = False) -> Host:
    """Returns the slots that trials may have: of this host, of all that one trial spans, or of a whole cluster.

    Args:
        experiment: what the user submitted.
        ray_address: of the Ray cluster; None for none.
        trains: whether a full experiment follows.

    Raises:
        InputError: the experiment names devices that are not there, or there is no such cluster.
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
            "the experiment says on which hosts or devices its trials run, and with --ray Ray does.",
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
    from trial_lib.launch.ray import cluster

    resource = cluster.kind_of_slots()
    cluster.share_of(experiment.config.resources.slots_per_trial, resource, experiment.source)
    return cluster.slots_of_all_nodes(resource)


def connect_to_ray(address: str) -> None:
    """Connects this process to a Ray cluster, unless it is already.

    Raises:
        InputError: there is none, or Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("prefect_ray") is None:
        raise InputError(
            "Ray, or Prefect's part for it, is not installed.",
            where=f"--ray {address}",
            remedy="Install it on every host: pip install 'zerotune[ray]'.",
        )
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        # Only such a study needs it.
        from trial_lib.launch.ray.cluster import connect

        connect(address)
    finally:
        # Ray has one of its own, by which the study would not hear that it is cancelled.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def starter_of(experiment: Experiment, arguments: StudyArguments, host: Host, log: str, note: Note) -> RankStarter:
    """Returns what starts trials on this host, or on all that one trial spans; it comes up in the background.

    Args:
        experiment: what the user submitted.
        arguments: the study's.
        host: the slots.
        log: path of the fork server's own output.
        note: told what takes its time.
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
    starter = WarmStarter(interpreter, builders, environment, log, note, ahead)
    starter.start()
    return starter


def cluster_of(experiment: Experiment, arguments: StudyArguments, host: Host, study_id: str, note: Note) -> Place:
    """Returns the hosts of the cluster that this process is connected to; their starters come up in the background.

    Args:
        experiment: what the user submitted.
        arguments: the study's.
        host: the slots of all hosts.
        study_id: the study's.
        note: told what the trials ask Ray for.
    """
    from trial_lib.launch.ray.cluster import RayCluster, share_of
    from trial_lib.launch.ray.host import HostSetup
    from trial_lib.launch.ray.place import RayPlace

    environment = environment_of(experiment, arguments.include, host.device)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    builders, ahead = _ops(experiment, arguments, host.device)
    setup = HostSetup(
        study_id=study_id,
        interpreter=interpreter_of(experiment),
        builders=builders,
        ahead=ahead,
        environment=environment,
        is_warm=arguments.start == "warm",
        lock_dir=host_lock_dir(),
    )
    resource = kind_of(host.device).resource
    share = share_of(experiment.config.resources.slots_per_trial, resource, experiment.source)
    note(f"trials ask the Ray cluster for {resource}s: {share.slots} on each of {share.hosts} host(s)")
    return RayPlace(study_id, RayCluster(setup, resource), share)


def _ops(experiment: Experiment, arguments: StudyArguments, device: str) -> tuple[list[str], list[str]]:
    """Returns the ops that a starter builds before all trials, and those that it builds beside the profile trial.

    On a CPU they are few, and a fork server loads them for its forks. What is built for a GPU takes minutes each.
    """
    ops = supposed_ops(experiment, arguments, device)
    return (ops, []) if kind_of(device).computes_on_the_processor else ([], ops)
