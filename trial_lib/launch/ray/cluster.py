"""The driver's side of a Ray cluster: its nodes, and the study's actor on each node."""

import contextlib
import logging
import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trial_lib.device.host.base import Host
from trial_lib.device.host.this_host import kind_called, this_host
from trial_lib.launch.hosts.hosts import is_this_host
from trial_lib.launch.ray.host import HostSetup, RayHost
from trial_lib.launch.ray.order import NAMESPACE, ClusterShare, actor_name
from trial_lib.wire.errors import InputError
from trial_lib.wire.imported import Import

_CONNECT_S = 5.0
_ANSWER_S = 60.0
_CLOSE_S = 15.0
# The actor runs trials and answers other calls meanwhile.
_CALLS_AT_ONCE = 256
# Older versions of Ray hide the GPUs from an actor that requests none.
_SEES_ALL = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}


def connect(address: str) -> None:
    """Connects this process to a cluster.

    Args:
        address: `HOST:PORT` of its head, or `auto` for the cluster of this machine.

    Raises:
        InputError: there is no such cluster.
    """
    if address.startswith("ray://"):
        raise InputError(
            "Ray's client cannot hold a study.",
            where=f"--ray {address}",
            remedy="Run zerotune on a node, with --ray auto.",
        )
    if ray.is_initialized():
        return
    try:
        if address != "auto":
            # Ray would try for a minute.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"there is no Ray cluster to connect to ({' '.join(str(error).split())[:200]}).",
            where=f"--ray {address}",
            remedy="Start one: `ray start --head` on this machine, `ray start --address=HOST:6379` on each other.",
        ) from None


def living_nodes() -> list[dict[str, Any]]:
    """Returns Ray's record of each living node."""
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in known if node["Alive"]]


def has_other_machines() -> bool:
    """Returns whether any node of the cluster is another machine."""
    return not all(is_this_host(str(node["NodeManagerAddress"])) for node in living_nodes())


def kind_of_slots() -> str:
    """Returns Ray's name of a slot: a GPU if any living node has one, or else a processor."""
    has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in living_nodes())
    return "GPU" if has_gpus else "CPU"


def slots_by_node(resource: str) -> dict[str, int]:
    """Returns the number of slots of each living node that has such slots."""
    counted = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in living_nodes()}
    return {node_id: count for node_id, count in counted.items() if count}


def share_of(slots_per_trial: int, resource: str, where: str) -> ClusterShare:
    """Returns the layout of a trial: on one node if a node has enough slots, or else on as few nodes as possible.

    Args:
        slots_per_trial: the slots that a trial takes.
        resource: Ray's name of a slot.
        where: the place that errors name.

    Raises:
        InputError: a trial does not fit on the cluster.
    """
    nodes = slots_by_node(resource)
    for hosts in range(1, len(nodes) + 1):
        slots, rest = divmod(slots_per_trial, hosts)
        if not rest and sum(count >= slots for count in nodes.values()) >= hosts:
            return ClusterShare(resource, slots, hosts)
    raise InputError(
        f"slots_per_trial is {slots_per_trial}, and the nodes of the Ray cluster have "
        f"{', '.join(map(str, nodes.values())) or 'no'} {resource} slot(s).",
        where=where,
        remedy="Set resources.slots_per_trial to what one node has, or equal parts of several.",
    )


def slots_of_all_nodes(resource: str) -> Host:
    """Returns the slots of all nodes as if one host had them, with the memory of the smallest node.

    Args:
        resource: Ray's name of a slot.

    Raises:
        InputError: the nodes have devices of different kinds, or cannot run trials.
    """
    nodes = slots_by_node(resource)
    described = [
        ray.remote(this_host).options(num_cpus=0, runtime_env=_SEES_ALL, scheduling_strategy=_on(node_id)).remote()
        for node_id in nodes
    ]
    try:
        hosts: list[Host] = ray.get(described, timeout=_ANSWER_S)
    except ray.exceptions.RayError as error:
        said = str(error).strip() or type(error).__name__
        raise InputError(
            f"a node of the Ray cluster cannot run trials ({said.splitlines()[-1]}).",
            where="--ray",
            remedy="Install ZeroTune on every node, in the same version.",
        ) from None
    kind = kind_called(resource)
    kinds = sorted({host.device for host in hosts})
    if kinds != [kind.device]:
        raise InputError(
            f"Ray counts {resource}s, and the devices of its nodes are {' and '.join(kinds)}.",
            where="--ray",
            remedy="Start every node with the number of its GPUs: `ray start --num-gpus N`.",
        )
    if kind.computes_on_the_processor:
        check_processors(list(nodes.values()), hosts)
    slots = [f"{node_id}/{number}" for node_id, count in nodes.items() for number in range(count)]
    return Host(kind.device, slots, min(host.memory_per_slot for host in hosts))


def check_processors(counts: Sequence[int], hosts: Sequence[Host]) -> None:
    """Refuses a node if Ray counts more processors there than trials may use, because trials would wait forever.

    Args:
        counts: the processors that Ray counts on each node.
        hosts: the devices that trials may use on each node, in the same order.

    Raises:
        InputError: there is such a node.
    """
    for count, host in zip(counts, hosts, strict=True):
        if count > len(host.slots):
            raise InputError(
                f"Ray counts {count} processors on a node that may use {len(host.slots)}.",
                where="--ray",
                remedy=f"Start it with `ray start --num-cpus {len(host.slots)}`.",
            )


def _on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


class RayCluster:
    """The study's actors, one on each node with slots.

    Args:
        setup: the study's setup on each host.
        resource: Ray's name of a slot. It does not change, even if the last host with GPUs leaves.
    """

    def __init__(self, setup: HostSetup, resource: str) -> None:
        self._setup = setup
        self._resource = resource
        self._actors: dict[str, Any] = {}
        self._imported: Sequence[Import] = ()
        self.refresh()

    def refresh(self) -> None:
        """Starts an actor on each node that has joined."""
        nodes = slots_by_node(self._resource)
        # Other threads iterate over the old dictionary meanwhile.
        actors = {node_id: actor for node_id, actor in self._actors.items() if node_id in nodes}
        for node_id in nodes.keys() - actors.keys():
            actor: Any = ray.remote(RayHost)
            actors[node_id] = actor.options(
                name=actor_name(self._setup.study_id, node_id),
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=_CALLS_AT_ONCE,
                runtime_env=_SEES_ALL,
                scheduling_strategy=_on(node_id),
            ).remote(self._setup)
            if self._imported:
                actors[node_id].prime.remote(self._imported)
        self._actors = actors

    def has_room_for(self, share: ClusterShare) -> bool:
        """Returns whether a trial could run if no other trial ran."""
        nodes = slots_by_node(share.resource)
        return sum(count >= share.slots for count in nodes.values()) >= share.hosts

    def prime(self, imported: Sequence[Import]) -> None:
        """Imports the modules of the profile trial ahead on every host."""
        self._imported = imported
        for actor in self._actors.values():
            actor.prime.remote(imported)

    def cancel(self, name: str | None = None) -> None:
        """Ends the ranks of one order on all hosts, or of all orders."""
        for actor in self._actors.values():
            actor.cancel.remote(name)

    def close(self) -> None:
        """Ends everything on all hosts, and the connection."""
        if not ray.is_initialized():
            return  # closed before: another call of Ray's would start a cluster here
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(
                [actor.close.remote() for actor in self._actors.values()],
                num_returns=len(self._actors),
                timeout=_CLOSE_S,
            )
        ray.shutdown()
