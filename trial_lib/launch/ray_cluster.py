"""The driver's side of a Ray cluster: its nodes, and the study's actor on each node."""

import contextlib
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import kind_called, this_host
from zerotune.trial_lib.launch.hosts import is_this_host
from zerotune.trial_lib.launch.rank_starter import HOST, HostRanks, ProcessesEnd, RankStarter
from zerotune.trial_lib.launch.ray_host import (
    NAMESPACE,
    ClusterOrder,
    ClusterShare,
    Delivery,
    HostSetup,
    RayHost,
    actor_name,
    unpack,
)
from zerotune.trial_lib.launch.trial import Note, OnResult, TrialPlan, begin, take_result, unstarted, write_unstarted
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.measurement import Import
from zerotune.trial_lib.records.candidate import Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialResult

_CONNECT_S = 5.0
_ANSWER_S = 60.0
_CLOSE_S = 15.0
# The actor runs trials and answers other calls meanwhile.
_CALLS_AT_ONCE = 256
# Older versions of Ray hide the GPUs from an actor that requests none.
_SEES_ALL = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}


def connect(address: str) -> None:
    """Connects this process to a cluster. Raises InputError: there is no such cluster."""
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
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in known if node["Alive"]]


def has_other_machines() -> bool:
    """Whether any node of the cluster is another machine."""
    return not all(is_this_host(str(node["NodeManagerAddress"])) for node in living_nodes())


def kind_of_slots() -> str:
    """Ray's name of a slot: a GPU if any living node has one, or else a processor."""
    has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in living_nodes())
    return "GPU" if has_gpus else "CPU"


def slots_by_node(resource: str) -> dict[str, int]:
    counted = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in living_nodes()}
    return {node_id: count for node_id, count in counted.items() if count}


def share_of(slots_per_trial: int, resource: str, where: str) -> ClusterShare:
    """Returns the layout of a trial: on one node if a node has enough slots, or else on as few nodes as possible.
    Raises InputError: a trial does not fit on the cluster.
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
    Raises InputError: the nodes have devices of different kinds, or cannot run trials.
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
    Raises InputError: there is such a node.
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


# Runs trials on the hosts of a Ray cluster. The study's folder stays on the driver's host.

_POLL_S = 0.5
# The time from a cancellation to the end of the ranks on all hosts.
_PATIENCE_S = 10.0


class HostLostError(Exception):
    """A host of an order is gone, or Ray's processes there are."""


class Sent(Protocol):
    """An order that was sent to the cluster."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for the order's end. Returns whether it has ended."""

    def delivery(self) -> Delivery:
        """Returns the answer. Raises HostLostError: there will be none."""

    def abandon(self) -> None:
        """Withdraws the order if it still waits for slots."""


class RayPlace:
    """Runs trials on a cluster, by an actor of the study on each node with slots.

    It sweeps if all ranks of a trial are on one host: the driver steers by files there.
    """

    send: Callable[[ClusterOrder], Sent]  # sends an order to the cluster

    def __init__(self, setup: HostSetup, share: ClusterShare) -> None:
        self._setup = setup
        self._share = share
        self.can_sweep = share.hosts == 1
        self.starter_here: RankStarter | None = None
        # A host that joins builds before it runs a trial.
        self.has_compiled = False
        self._lock = threading.Lock()
        self._actors: dict[str, Any] = {}
        self._imported: Sequence[Import] = ()
        self._start_actors()

    def _start_actors(self) -> None:
        # One on each node that has joined. A slot's name stays, even if the last host with GPUs leaves.
        nodes = slots_by_node(self._share.resource)
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

    def _has_room(self) -> bool:
        # Whether a trial could run if no other trial ran.
        nodes = slots_by_node(self._share.resource)
        return sum(count >= self._share.slots for count in nodes.values()) >= self._share.hosts

    def _cancel(self, name: str | None = None) -> None:
        # Ends the ranks of one order on all hosts, or of all orders.
        for actor in self._actors.values():
            actor.cancel.remote(name)

    def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
        started_at, began = time.time(), time.monotonic()
        begin(plan)
        delivery = self._carried_out(ClusterOrder(self._setup.study_id, (plan,), self._share), cancelled, note)
        if isinstance(delivery, TrialResult):
            write_unstarted(plan, delivery)
            return delivery
        unpack(delivery.files[0], plan.paths.root)
        if delivery.ending is not None:
            device = "cuda" if self._share.resource == "GPU" else "cpu"
            seconds = time.monotonic() - began
            return take_result(plan, delivery.ending, delivery.kernel_killed, device, started_at, seconds)
        (result,) = delivery.ends
        assert isinstance(result, TrialResult)
        _write(plan.paths.result, result)
        return result

    def run_sweep(
        self, plans: Sequence[TrialPlan], sweep: Sweep, cancelled: threading.Event, note: Note, measured: OnResult
    ) -> list[TrialResult | Withdrawal]:
        """All results arrive together, when the last size has ended."""
        for plan in plans:
            begin(plan)
        order = ClusterOrder(self._setup.study_id, tuple(plans), self._share, sweep)
        delivery = self._carried_out(order, cancelled, note)
        ends: list[TrialResult | Withdrawal]
        if isinstance(delivery, TrialResult):
            ends = [delivery, *[Withdrawal.ENDED] * (len(plans) - 1)]
        else:
            ends = delivery.ends
            for plan, files in zip(plans, delivery.files, strict=True):
                unpack(files, plan.paths.root)
        for position, (plan, end) in enumerate(zip(plans, ends, strict=True)):
            if isinstance(end, TrialResult):
                _write(plan.paths.result, end)
                measured(position, end)
            else:
                shutil.rmtree(plan.paths.root, ignore_errors=True)
        return ends

    def _carried_out(self, order: ClusterOrder, cancelled: threading.Event, note: Note) -> Delivery | TrialResult:
        # The answer to an order. If there is none, the result of its first trial.
        started_at = time.time()
        sent = self.send(order)
        gives_up_at = float("inf")
        waits_for_a_host = False
        while not sent.wait(_POLL_S):
            with self._lock:
                self._start_actors()
            if not waits_for_a_host and not self._has_room():
                waits_for_a_host = True
                note(
                    f"waiting for a host: the cluster has no {self._share.hosts} with "
                    f"{self._share.slots} {self._share.resource} slot(s) any more"
                )
            if cancelled.is_set() and gives_up_at == float("inf"):
                gives_up_at = time.monotonic() + _PATIENCE_S
                self._cancel()
            if time.monotonic() >= gives_up_at:
                sent.abandon()
                return unstarted(order.plans[0], Outcome.CANCELLED, "Cancelled before a host had room for it.")
        try:
            delivery = sent.delivery()
        except HostLostError as error:
            # Its ranks may still run if only Ray's processes have died.
            self._cancel(order.name)
            if cancelled.is_set():
                return unstarted(order.plans[0], Outcome.CANCELLED, "Cancelled while it ran.")
            said = f"The host died while the trial ran: {error}"
            lost = unstarted(order.plans[0], Outcome.CRASHED, said, from_outside=True)
            return replace(lost, started_at=started_at)
        for text in delivery.notes:
            note(text)
        return delivery

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """Every host builds its ops when it joins, so this does nothing."""
        return {}

    def prime(self, imported: Sequence[Import]) -> None:
        self._imported = imported
        for actor in self._actors.values():
            actor.prime.remote(imported)

    def close(self) -> None:
        if not ray.is_initialized():
            return  # closed before: another call of Ray's would start a cluster here
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(
                [actor.close.remote() for actor in self._actors.values()],
                num_returns=len(self._actors),
                timeout=_CLOSE_S,
            )
        ray.shutdown()


def _write(path: Path, result: TrialResult) -> None:
    write_whole(path, result.to_text())


# The Ray task of an order. It holds the slots that Ray has assigned, and the hosts' actors do the work.

_GRACE_S = 5.0
_JOINING_S = 60.0
_WORK_POLL_S = 0.2


def options_of(share: ClusterShare) -> dict[str, Any]:
    """Returns the options of a trial's Ray task.

    The task of a trial over several hosts has a placement group, and waits for it on the driver's host. On another
    host the task would be lost with that host.
    """
    on_one = share.hosts == 1
    asked: dict[str, Any] = {"num_cpus": share.slots if on_one and share.resource == "CPU" else 0}
    if share.resource == "GPU":
        asked["num_gpus"] = share.slots if on_one else 0
    if not on_one:
        here = ray.get_runtime_context().get_node_id()
        asked["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
    # The study decides about the trials of a dead host, so Ray does not retry.
    return {**asked, "max_retries": 0}


def carry_out(order: ClusterOrder) -> Delivery:
    """Carries out an order, in a Ray task on the host that Ray has chosen."""
    if order.share.hosts == 1:
        host = _actor(order.study_id, ray.get_runtime_context().get_node_id())
        delivery: Delivery = host.run.remote(order, _devices()).future().result()
        return delivery
    group = placement_group([{order.share.resource: order.share.slots}] * order.share.hosts, strategy="STRICT_SPREAD")
    try:
        group.ready().future().result()
        return _over_hosts(order, group)
    finally:
        remove_placement_group(group)


# A host's id, and the end of the trial's part there.
_Running = tuple[str, "Future[Delivery]"]


def _over_hosts(order: ClusterOrder, group: PlacementGroup) -> Delivery:
    # Runs one trial on the hosts of a placement group.
    plan, share = order.plans[0], order.share
    table = placement_group_table(group)
    node_ids = [table["bundles_to_node_id"][bundle] for bundle in range(share.hosts)]
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in known}
    port = _actor(order.study_id, node_ids[0]).meet.remote(order.name).future().result()
    running: list[_Running] = []
    for bundle, node_id in enumerate(node_ids):
        part = HostRanks(bundle * share.slots, share.slots, share.hosts * share.slots, addresses[node_ids[0]], port)
        asked = {"num_cpus" if share.resource == "CPU" else "num_gpus": share.slots}
        task = ray.remote(_run_part).options(
            **{"num_cpus": 0, **asked},
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        running.append((node_id, task.remote(order.study_id, plan, part).future()))
    _wait(order, running)
    return _delivery(running, share, addresses)


def _run_part(study_id: str, plan: TrialPlan, part: HostRanks) -> Delivery:
    # Runs one host's part, in a Ray task on that host.
    host = _actor(study_id, ray.get_runtime_context().get_node_id())
    delivery: Delivery = host.run_part.remote(plan, part, _devices()).future().result()
    return delivery


def _wait(order: ClusterOrder, running: list[_Running]) -> None:
    # Waits for all parts. If one fails, the others have a moment to write their records, as on one host.
    left = {ended for _, ended in running}
    while left:
        ended, left = wait(left, return_when=FIRST_COMPLETED)
        if all(_ended_well(one) for one in ended):
            continue
        _, left = wait(left, timeout=_GRACE_S)
        for node_id, part in running:
            if part in left:
                _actor(order.study_id, node_id).cancel.remote(order.name)


def _ended_well(ended: "Future[Delivery]") -> bool:
    ending = None if ended.exception() is not None else ended.result().ending
    return ending is not None and ending.ended_by == "ranks" and not any(ending.statuses)


def _delivery(running: list[_Running], share: ClusterShare, addresses: dict[str, str]) -> Delivery:
    # Combines the ends of the parts into the end of one trial.
    errors = [part.exception() for _, part in running]
    for error in errors:
        if error is not None and not is_loss(error):
            raise error
    ends = [None if error else part.result() for (_, part), error in zip(running, errors, strict=True)]
    statuses: list[int | None] = []
    # Of each part that has ended by itself: the first of its ranks, and its end.
    endings: list[tuple[int, ProcessesEnd]] = []
    for number, end in enumerate(ends):
        if end is None or end.ending is None:
            statuses += [None] * share.slots
        else:
            statuses += end.ending.statuses
            endings.append((number * share.slots, end.ending))
    # The trial's end is the first loss of a host, or else the first end of a part that shows something.
    if None in ends:
        lost = ends.index(None)
        host = addresses[running[lost][0]]
        ending = ProcessesEnd(HOST, statuses, host=host, host_rank=lost * share.slots)
    else:
        # A part that was ended because another had failed shows nothing.
        own = [each for each in endings if each[1].ended_by != "cancel"] or endings
        first_rank, shown = next((each for each in own if each[1].ended_by != "ranks"), own[0])
        ending = ProcessesEnd(shown.ended_by, statuses, rank=first_rank + shown.rank, seen=shown.seen)
    there = [end for end in ends if end is not None]
    files = {name: content for end in there for part in end.files for name, content in part.items()}
    notes = [note for end in there for note in end.notes]
    killed = {end.kernel_killed for end in there}
    # None if the kernel of a host does not show it, and no other has.
    kernel_killed = True if True in killed else None if None in killed else False
    return Delivery(ending=ending, kernel_killed=kernel_killed, files=[files], notes=notes)


def is_loss(error: BaseException) -> bool:
    """Returns whether an exception means that a host, or Ray's processes there, are gone. The work has not failed."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return isinstance(error.cause, ray.exceptions.RayError)
    return isinstance(error, ray.exceptions.RayError)


def _actor(study_id: str, node_id: str) -> Any:
    # The study's actor on a node. On a new node the driver is about to start it.
    deadline = time.monotonic() + _JOINING_S
    while True:
        try:
            return ray.get_actor(actor_name(study_id, node_id), namespace=NAMESPACE)
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_WORK_POLL_S)


def _devices() -> list[str]:
    return [str(device) for device in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
