"""Collectives of the pretended world: they take no time, move nothing, and are noted with their bytes and group."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor

from trial_lib.foresee.inside import known_numbers, processor_kernels
from trial_lib.foresee.inside.memory_log import BUFFER, MemoryLog
from trial_lib.foresee.inside.operation_log import OperationLog

# The class of each operator, and the position of the larger tensor: what is gathered, or what is scattered.
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "reduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "gather_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "scatter_": ("broadcast", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("send", 0),
    "recv_any_source_": ("send", 0),
}

_GATHER = ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_")
_REDUCE = ("allreduce_", "allreduce_coalesced_", "reduce_")
_EXCHANGE = ("alltoall_", "alltoall_base_")
# They write what other ranks have.
_RECEIVE = (
    "allgather_coalesced_",
    "gather_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "recv_",
    "recv_any_source_",
)


def note(func: Any, args: Any, operations: OperationLog) -> None:
    """Notes a collective."""
    kind, position = _KINDS.get(func._opname, ("", 0))
    if not kind:
        return
    tensors = _tensors(args[position])
    if tensors:
        moved = sum(each.numel() * each.element_size() for each in tensors)
        operations.transfer(kind, tensors[0], moved, _group_size(args))


def pretend(func: Any, args: Any, kwargs: Any, operations: OperationLog, memory: MemoryLog) -> Any:
    """Notes a collective of fake tensors, and returns what its operator returns, with work that is done.

    Known numbers of a tensor that is broadcast, reduced or gathered stay known, as if all ranks had the same.
    """
    note(func, args, operations)
    name = func._opname
    if name in _GATHER:
        for gathered, given in _gathered(args):
            memory.name(gathered, BUFFER)
            known_numbers.gather(gathered, given)
    elif name in _EXCHANGE:
        _exchange(args)
    elif name in _RECEIVE:
        for each in _tensors(args[0]):
            known_numbers.forget(each)
    elif name in _REDUCE:
        # A sum of ones is as many as there are ranks.
        for each in _tensors(args[0]):
            if not known_numbers.is_known(each):
                known_numbers.forget(each)
    kind, position = _KINDS.get(name, ("", 0))
    if kind:
        whole = sum(each.numel() * each.element_size() for each in _tensors(args[position]))
        processor_kernels.note_collective(kind, whole, memory)
    work = FakeWork().boxed()
    returns = len(func._schema.returns)
    return work if returns == 1 else (args[0], work)


def _gathered(args: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields what a rank gathers, one tensor for all ranks or one for each, with what the rank gives."""
    outputs, inputs = (each if isinstance(each, (list, tuple)) else [each] for each in args[:2])
    for output, given in zip(outputs, inputs, strict=True):
        for gathered in _tensors(output):
            yield gathered, given


def _exchange(args: Any) -> None:
    """Lets what rank 0 receives be known if what it gives is. All ranks give it what it gives to itself."""
    received, given = args[:2]
    if isinstance(given, torch.Tensor):
        sizes = args[4]
        first = sizes[0] if sizes else len(given) // max(1, _group_size(args))
        known = known_numbers.known_numbers(given) if isinstance(given, FakeTensor) else given
        if known is None:
            known_numbers.forget(received)
        else:
            known_numbers.gather(received, known[:first])
        return
    for each in received:
        known_numbers.gather(each, given[0])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _group_size(args: Any) -> int:
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                return int(ProcessGroup.unbox(each).size())
            except (RuntimeError, TypeError):
                continue
    return 1


def is_fake(value: Any) -> bool:
    """Returns whether a collective's tensors are fake."""
    return any(isinstance(each, FakeTensor) for each in _tensors(value))
