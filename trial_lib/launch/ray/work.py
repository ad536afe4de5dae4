"""The Ray task of an order. It holds the slots that Ray has assigned, and the hosts' actors do the work.

The task waits on futures and never in `ray.get`, which would give its processors to other tasks meanwhile.
"""

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trial_lib.launch.program import HostRanks
from trial_lib.launch.rank_starter import HOST, ProcessesEnd
from trial_lib.launch.ray.host import PartEnd
from trial_lib.launch.ray.order import NAMESPACE, ClusterOrder, ClusterShare, Delivery, actor_name
from trial_lib.launch.trial import TrialPlan

_GRACE_S = 5.0
_JOINING_S = 60.0
_POLL_S = 0.2


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


@dataclass(frozen=True)
class _Running:
    """A running part on one host."""

    node_id: str
    ended: "Future[PartEnd]"


def _over_hosts(order: ClusterOrder, group: PlacementGroup) -> Delivery:
    """Runs one trial on the hosts of a placement group."""
    plan, share = order.plans[0], order.share
    table = placement_group_table(group)
    node_ids = [table["bundles_to_node_id"][bundle] for bundle in range(share.hosts)]
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in known}
    port = _actor(order.study_id, node_ids[0]).meet.remote(order.name).future().result()
    running = []
    for bundle, node_id in enumerate(node_ids):
        part = HostRanks(bundle * share.slots, share.slots, share.hosts * share.slots, addresses[node_ids[0]], port)
        asked = {"num_cpus" if share.resource == "CPU" else "num_gpus": share.slots}
        task = ray.remote(_run_part).options(
            **{"num_cpus": 0, **asked},
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        running.append(_Running(node_id, task.remote(order.study_id, plan, part).future()))
    _wait(order, running)
    return _delivery(running, share, addresses)


def _run_part(study_id: str, plan: TrialPlan, part: HostRanks) -> PartEnd:
    """Runs one host's part, in a Ray task on that host."""
    host = _actor(study_id, ray.get_runtime_context().get_node_id())
    end: PartEnd = host.run_part.remote(plan, part, _devices()).future().result()
    return end


def _wait(order: ClusterOrder, running: list[_Running]) -> None:
    """Waits for all parts. If one fails, the others have a moment to write their records, as on one host."""
    left = {part.ended for part in running}
    while left:
        ended, left = wait(left, return_when=FIRST_COMPLETED)
        if all(_ended_well(one) for one in ended):
            continue
        _, left = wait(left, timeout=_GRACE_S)
        for part in running:
            if part.ended in left:
                _actor(order.study_id, part.node_id).cancel.remote(order.name)


def _ended_well(ended: "Future[PartEnd]") -> bool:
    if ended.exception() is not None:
        return False
    ending = ended.result().ending
    return ending.ended_by == "ranks" and not any(ending.statuses)


def _delivery(running: list[_Running], share: ClusterShare, addresses: dict[str, str]) -> Delivery:
    """Combines the ends of the parts into the end of one trial."""
    errors = [part.ended.exception() for part in running]
    for error in errors:
        if error is not None and not is_loss(error):
            raise error
    ends = [None if error else part.ended.result() for part, error in zip(running, errors, strict=True)]
    statuses: list[int | None] = []
    for end in ends:
        statuses += [None] * share.slots if end is None else end.ending.statuses
    lost = [number for number, end in enumerate(ends) if end is None]
    there = [end for end in ends if end is not None]
    if lost:
        host = addresses[running[lost[0]].node_id]
        ending = ProcessesEnd(HOST, statuses, host=host, host_rank=lost[0] * share.slots)
    else:
        # A part that was ended because another had failed shows nothing.
        own = [end.ending for end in there if end.ending.ended_by != "cancel"] or [end.ending for end in there]
        failed = [ending for ending in own if ending.ended_by != "ranks"] or own
        first = next(number for number, end in enumerate(ends) if end is not None and end.ending is failed[0])
        rank = first * share.slots + failed[0].rank
        ending = ProcessesEnd(failed[0].ended_by, statuses, rank=rank, seen=failed[0].seen)
    files = {name: content for end in there for name, content in end.files.items()}
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
    """Returns the study's actor on a node. On a new node the driver is about to start it."""
    deadline = time.monotonic() + _JOINING_S
    while True:
        try:
            return ray.get_actor(actor_name(study_id, node_id), namespace=NAMESPACE)
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def _devices() -> list[str]:
    """Returns the GPUs that Ray has assigned to this task."""
    return [str(device) for device in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
