"""Seconds of a transfer: bytes over the slowest link of its way, and the latency of each hop. Pure.

A ring is what NCCL uses for large tensors. Its latencies are those of NCCL's own model of rings (`src/graph/tuning.cc`,
protocol Simple, BSD-3-Clause), in seconds.
"""

from dataclasses import dataclass

from trial_lib.foresee.time.devices import Cluster
from trial_lib.foresee.time.efficiencies import Efficiencies

_BASE, _HOP_WITHIN, _HOP_BETWEEN = 8.4e-6, 3.4e-6, 14e-6
# How often a whole tensor goes around a ring.
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}
_SEND = "send"
COLLECTIVES = (*_ROUNDS, _SEND)
"""The names in `OPERATIONS` of transfers between devices."""
DISK = ("from_disk", "to_disk")
"""The names in `OPERATIONS` of what NVMe drives do."""
# They wrote 5 GB/s where they read 10 (blogs/deepspeed-gds of DeepSpeed).
_WRITTEN = 0.5
# A transfer to the host has to be set up by the driver, and small ones wait for it.
_COPY_LATENCY = 10e-6
# Pages that are not locked are copied twice, by one thread of the host.
_UNLOCKED = 0.3


@dataclass(frozen=True)
class Group:
    """The ranks of a collective.

    Attributes:
        ranks: of the group.
        members: of them on one host.
    """

    ranks: int
    members: int

    @property
    def hosts(self) -> int:
        """On which they are."""
        return -(-self.ranks // self.members)


def group_of(ranks: int, replicas: int, world: int, cluster: Cluster, stages: int = 1) -> Group:
    """Returns where the ranks of a collective are.

    Tensor and sequence parallelism take neighbouring ranks. The replicas of a model then are ranks at a distance, and a
    host has fewer of a group's ranks than it has devices. All ranks of a pipeline's stage are neighbours
    (`PipeModelDataParallelTopology` in deepspeed/runtime/pipe/topology.py).

    Args:
        ranks: of the group.
        replicas: of the model. A group of so many ranks has them all.
        world: all ranks.
        cluster: their devices.
        stages: of a pipeline; 1 without one.
    """
    shards = max(1, world // max(1, replicas) // stages)
    members = max(1, cluster.per_host // shards) if ranks == replicas else cluster.per_host
    return Group(ranks, max(1, min(ranks, members)))


def collective_seconds(kind: str, size: float, group: Group, cluster: Cluster, efficiencies: Efficiencies) -> float:
    """Returns the seconds of a collective.

    Every hop of a ring carries the same bytes, so its slowest link decides. A ring leaves a host once, and several
    rings share the host's adapters among its members. `send` is one hop, from a rank to another one of its group. In a
    group on several hosts, some ranks send to another host, and the others wait for them.

    Args:
        kind: its name in `OPERATIONS`.
        size: bytes of the whole tensor: what `all_gather` returns, what `reduce_scatter` takes.
        group: its ranks.
        cluster: their devices.
        efficiencies: the share that collectives get of a link.
    """
    if group.ranks < 2:
        return 0.0
    device = cluster.device
    if kind == _SEND:
        if group.hosts == 1:
            return _BASE + _HOP_WITHIN + size / (device.link * efficiencies.link.value)
        return _BASE + _HOP_BETWEEN + size / (device.network * efficiencies.network.value)
    rounds = _ROUNDS[kind]
    carried = size * rounds * (group.ranks - 1) / group.ranks
    within = carried / (device.link * efficiencies.link.value) if group.members > 1 else 0.0
    hops = rounds * (group.ranks - 1)
    if group.hosts == 1:
        return _BASE + hops * _HOP_WITHIN + within
    outside = rounds * (group.hosts - 1)
    adapters = device.network * efficiencies.network.value * group.members
    # There each rank sends to all others itself, and its neighbours do so at the same time.
    between = (
        size * (group.ranks - group.members) / group.ranks / (adapters / group.members)
        if kind == "all_to_all"
        else carried / adapters
    )
    return _BASE + (hops - outside) * _HOP_WITHIN + outside * _HOP_BETWEEN + max(within, between)


def copy_seconds(size: float, is_pinned: bool, cluster: Cluster, efficiencies: Efficiencies) -> float:
    """Returns the seconds of a copy between a device and its host.

    Args:
        size: bytes.
        is_pinned: whether the host's pages are locked.
        cluster: the devices.
        efficiencies: the share that copies get of the link.
    """
    share = efficiencies.to_host.value * (1.0 if is_pinned else _UNLOCKED)
    return _COPY_LATENCY + size / (cluster.device.to_host * share)


def swap_seconds(kind: str, size: float, cluster: Cluster, efficiencies: Efficiencies) -> float:
    """Returns the seconds in which a host's NVMe drives read or write for a device.

    Args:
        kind: `from_disk` or `to_disk`.
        size: bytes.
        cluster: the devices.
        efficiencies: the share of the drives' figure.
    """
    return size / (cluster.device.disk * efficiencies.disk.value * (_WRITTEN if kind == "to_disk" else 1.0))
