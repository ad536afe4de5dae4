"""The ranks of a training, and the exchange of objects between them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist


class InvalidTrialError(Exception):
    """The user's trial breaks the API. The message says what, where and the remedy."""


_PATIENCE = timedelta(hours=24)
"""How long a rank waits for the others: one of them may validate, hash or convert for hours. Gloo notices at once when
one has died, whatever this says."""


@dataclass(eq=False, repr=False)
class DistributedContext:
    """The place of this rank among all ranks, and collectives of Python objects.

    Objects are pickled and travel through main memory, in a gloo process group that is made at the first collective.
    They need no room on a device, and may wait for hours, which the group of the gradients must not. A tensor arrives
    on the device that it came from, so pass CPU tensors. All ranks have to call all collectives (the local ones all
    ranks of a node), in the same order. A world of one needs no process group.
    """

    rank: int = 0  # of this process, from 0 to `size` - 1
    size: int = 1
    local_rank: int = 0  # of this process on its node
    local_size: int = 1  # the ranks on this node
    cross_rank: int = 0  # of this node among all nodes
    cross_size: int = 1  # the nodes
    _group: dist.ProcessGroup | None = field(default=None, init=False)
    _local_group: dist.ProcessGroup | None = field(default=None, init=False)

    @classmethod
    def from_torch(cls) -> "DistributedContext":
        """The context of this process. Nothing is sent.

        Rank and size are the process group's. If the trial makes the group itself and there is none yet, they are RANK
        and WORLD_SIZE of the environment. The node's numbers come from LOCAL_RANK and LOCAL_WORLD_SIZE (DeepSpeed's
        launcher: LOCAL_SIZE), and from CROSS_RANK and CROSS_SIZE or GROUP_RANK and GROUP_WORLD_SIZE if a launcher sets
        them.
        """
        initialized = _is_initialized()
        rank = dist.get_rank() if initialized else _environment("RANK", default=0)
        size = dist.get_world_size() if initialized else _environment("WORLD_SIZE", default=1)
        if size == 1:
            return cls()
        local_rank = _environment("LOCAL_RANK", default=rank)
        local_size = _environment("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=size)
        first = rank - local_rank
        if not (0 <= local_rank < local_size and 0 <= first <= size - local_size) or (local_size == size and first):
            raise InvalidTrialError(
                f"Rank {rank} of {size} has LOCAL_RANK={local_rank} and {local_size} ranks on its node, which cannot "
                "be: set LOCAL_RANK and LOCAL_WORLD_SIZE for each rank, with the ranks numbered node by node."
            )
        return cls(
            rank,
            size,
            local_rank,
            local_size,
            cross_rank=_environment("CROSS_RANK", "GROUP_RANK", default=rank // local_size),
            cross_size=_environment("CROSS_SIZE", "GROUP_WORLD_SIZE", default=-(-size // local_size)),
        )

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> "DistributedContext":
        """Determined's name for `from_torch`. The ranks meet in torch's process group, so `chief_ip` is not needed."""
        return cls.from_torch()

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> "DistributedContext":
        return cls.from_torch()

    def get_rank(self) -> int:
        return self.rank

    def get_size(self) -> int:
        return self.size

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_local_size(self) -> int:
        return self.local_size

    def get_cross_rank(self) -> int:
        return self.cross_rank

    def get_cross_size(self) -> int:
        return self.cross_size

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks, by rank, on rank 0; None on the others."""
        return self._gather(value, 0, self.size, self._all()) if self._has_peers() else [value]

    def gather_local(self, value: Any) -> list[Any] | None:
        """The values of this node's ranks, by rank, on its first rank; None on the others."""
        if not self._has_local_peers():
            return [value]
        return self._gather(value, self._first_local, self.local_size, self._local())

    def allgather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on every rank."""
        return self._allgather(value, self.size, self._all()) if self._has_peers() else [value]

    def allgather_local(self, value: Any) -> list[Any]:
        """The values of this node's ranks, by rank, on each of them."""
        return self._allgather(value, self.local_size, self._local()) if self._has_local_peers() else [value]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        return self._broadcast(value, 0, self._all()) if self._has_peers() else value

    def broadcast_local(self, value: Any) -> Any:
        """The value of this node's first rank on each of its ranks."""
        return self._broadcast(value, self._first_local, self._local()) if self._has_local_peers() else value

    def barrier(self) -> None:
        if self._has_peers():
            dist.barrier(group=self._all())

    @property
    def _first_local(self) -> int:
        return self.rank - self.local_rank

    def _has_peers(self) -> bool:
        if self.size > 1 and not _is_initialized():
            raise InvalidTrialError(
                f"{self.size} ranks cannot talk to each other before the process group exists: where the trial "
                "initialises it itself, call deepspeed.init_distributed() before anything that needs the other ranks."
            )
        return self.size > 1

    def _has_local_peers(self) -> bool:
        return self._has_peers() and self.local_size > 1

    def _all(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = _object_group(None)
        return self._group

    def _local(self) -> dist.ProcessGroup:
        # The process group of this node's ranks for objects. It is that of all ranks on a single node.
        if self.local_size == self.size:
            return self._all()
        if self._local_group is None:
            self._local_group = _object_group(list(range(self._first_local, self._first_local + self.local_size)))
        return self._local_group

    def _gather(self, value: Any, target: int, size: int, group: dist.ProcessGroup) -> list[Any] | None:
        values: list[Any] | None = [None] * size if self.rank == target else None
        dist.gather_object(value, values, dst=target, group=group)
        return values

    def _allgather(self, value: Any, size: int, group: dist.ProcessGroup) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=group)
        return values

    def _broadcast(self, value: Any, source: int, group: dist.ProcessGroup) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=source, group=group)
        return values[0]


def _object_group(ranks: list[int] | None) -> dist.ProcessGroup:
    try:
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=_PATIENCE, backend="gloo", use_local_synchronization=ranks is not None
        )
    except RuntimeError as error:
        raise InvalidTrialError(
            f"The ranks cannot exchange objects through gloo ({error}): set GLOO_SOCKET_IFNAME to the network "
            "interface through which the hosts reach each other."
        ) from error
    return group


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _environment(*names: str, default: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), default)


# Work that one rank does for all, and files that all ranks must see. Every rank returns, or every rank raises.

_Result = TypeVar("_Result")


def on_rank_0(distributed: DistributedContext, work: Callable[[], _Result]) -> _Result:
    """Does something on rank 0 and gives its result to every rank. Call it on all ranks.

    An OSError or InvalidTrialError is raised on every rank, with the same words.
    """
    result: _Result | None = None
    failure: OSError | InvalidTrialError | None = None
    if distributed.rank == 0:
        try:
            result = work()
        except (OSError, InvalidTrialError) as error:
            failure = error
    told = None if failure is None else (isinstance(failure, OSError), str(failure))
    agreed: _Result
    agreed, problem = distributed.broadcast((result, told))
    if problem is not None:
        of_the_system, words = problem
        raise (OSError if of_the_system else InvalidTrialError)(words) from failure
    return agreed


def must_be_seen(distributed: DistributedContext, folder: Path) -> None:
    """Raises an OSError on every rank if one does not see a folder that rank 0 has made."""
    sees = distributed.allgather(folder.is_dir())
    if not all(sees):
        raise OSError(
            f"Rank {sees.index(False)} does not see the folder {folder}, which rank 0 does: checkpoints need a "
            "folder on a file system that all hosts share."
        )


# The device of a rank, its process group, and moving data to it.

# Determined's name, and ZeroTune's own.
_MANUAL_INIT = ("DET_MANUAL_INIT_DISTRIBUTED", "ZEROTUNE_MANUAL_INIT_DISTRIBUTED")


def rank_device(local_rank: int) -> torch.device:
    # The accelerator, which becomes the current one. Else the CPU.
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank))


def join_process_group(device: torch.device) -> None:
    """Initialises the process group for a rank's device, unless the trial does."""
    if any(os.environ.get(name, "0").lower() not in ("", "0", "false") for name in _MANUAL_INIT):
        return
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else None)


def move_to(device: torch.device, data: Any) -> Any:
    """Moves tensors, objects with their own `to`, and mappings, lists and tuples of those to any depth."""
    if isinstance(data, torch.Tensor):
        # A copy from pinned memory runs beside the computation. The device's stream keeps the order.
        return data.to(device, non_blocking=device.type != "cpu")
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, Mapping):
        moved = {key: move_to(device, value) for key, value in data.items()}
        return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to(device, value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(move_to(device, value) for value in data)
    return data
