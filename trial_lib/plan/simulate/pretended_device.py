"""The pretended device, in torch's slot for foreign devices, and the pretended world of N ranks with rank 0 alone."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ReduceOp
from torch.testing._internal.distributed import fake_pg
from torch.utils import backend_registration

from zerotune.trial_lib.plan.simulate import known_numbers
from zerotune.trial_lib.plan.simulate.logs import BUFFER, DEVICE, PROCESSOR, THREAD, MemoryLog, OperationLog
from zerotune.trial_lib.rank.loader_batches import tensors_in
from zerotune.trial_lib.rank.patching import Change, Patch, Table, always, around, instead, with_given

NAME = DEVICE


class Stream:
    """A stream or an event of the pretended device. Its work is done at once."""

    cuda_stream = stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def device(self) -> torch.device:
        return device()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        """Selects the one before."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else Stream()

    def _does_nothing(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = wait_event = wait_stream = _does_nothing


class _Module:
    """What torch looks for in a device's module. A program finds `torch.cuda` in its place, so that has the rest."""

    Stream = Event = Stream

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> Any:
        return Stream()

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def _does_nothing(self, *args: Any, **kwargs: Any) -> None: ...

    set_device = synchronize = empty_cache = manual_seed_all = manual_seed = set_rng_state = _does_nothing

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield


@functools.cache
def register() -> None:
    """Makes the pretended device known to torch. A fork server of foreseen runs does so before it imports anything."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # `torch.tensor(..., device=...)` then makes a tensor of the host, and moves it where a mode sees it.
    torch._C._set_only_lift_cpu_tensors(True)


@functools.cache
def device() -> torch.device:
    return torch.device(NAME, 0)


def as_written(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The arguments of an operator that makes tensors, as a program means them, and whether the result is page-locked.

    They have this device for one of CUDA, and no `pin_memory`.
    """
    read = dict(kwargs)
    is_pinned = bool(read.pop("pin_memory", False))
    where = read.get("device")
    if where is not None and where.type == "cuda":
        read["device"] = device()
    return read, is_pinned


# The pretended world: process groups of N ranks of which rank 0 alone exists (torch's fake process group).


def _init_process_group(mode: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    original(backend="fake", store=fake_pg.FakeStore(), rank=0, world_size=mode.order.world)


def _new_group(original: Any, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    kept = {name: kwargs[name] for name in ("use_local_synchronization", "group_desc") if name in kwargs}
    return original(ranks, backend="fake", **kept)


def _each_by_itself(original: Any, p2p_op_list: list[Any]) -> list[Any]:
    return [each.op(each.tensor, each.peer, group=each.group, tag=each.tag) for each in p2p_op_list]


def _receive_from_next_stage(instructions: Mapping[Any, Any], mode: Any) -> Any:
    (instruction,) = (each for each in instructions if each.__name__ == "RecvGrad")
    receive = instructions[instruction]

    @functools.wraps(receive)
    def received(engine: Any, buffer_id: int) -> None:
        receive(engine, buffer_id)
        if engine.is_pipe_partitioned and engine.is_grad_partitioned:
            division = engine.pipe_buffers["outputs"][buffer_id][0]
            engine.grad_partition_grad_layer_meta_cache = division.to("cpu")

    return {**instructions, instruction: received}


def _all_gather_object(object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, *args: Any, **kwargs: Any
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def _sum_over_ranks(original: Any, mode: Any) -> Any:
    is_inside = False

    def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        nonlocal is_inside
        if is_inside:
            # A default device is a mode of Python's calls, so the original calls the function of this name once more.
            return original(tensor, op, group, async_op)
        is_inside = True
        try:
            work = original(tensor, op, group, async_op)
        finally:
            is_inside = False
        numbers = known_numbers.known_numbers(tensor) if isinstance(tensor, FakeTensor) else tensor
        if numbers is not None and op == ReduceOp.SUM and numbers.dtype != torch.bool:
            numbers.detach().mul_(torch.distributed.get_world_size(group))
        return work

    return all_reduce


_PICKLES = "It pickles objects, and a fake tensor cannot be pickled. Every rank has what rank 0 has."
PATCHES: Table = (
    Change("torch", f"device type {NAME!r}", "It has torch's slot for a foreign device.", lambda *given: register()),
    Patch(
        "torch.distributed",
        "init_process_group",
        "Rank 0 alone exists of the world's ranks.",
        with_given(_init_process_group),
    ),
    Patch("torch.distributed", "new_group", "Each group is a pretended one as well.", around(_new_group)),
    Patch("torch.distributed", "barrier monitored_barrier", "The other ranks are there at once.", always(None)),
    Patch("torch.distributed", "batch_isend_irecv", "It looks for a backend of the device.", around(_each_by_itself)),
    Patch("torch.distributed", "broadcast_object_list", _PICKLES, always(None)),
    Patch("torch.distributed", "all_gather_object", _PICKLES, instead(_all_gather_object)),
    Patch("torch.distributed", "gather_object", _PICKLES, instead(_gather_object)),
    Patch("torch.distributed", "scatter_object_list", _PICKLES, instead(_scatter_object_list)),
    Patch("torch.distributed", "all_reduce", "Known numbers are summed as if all ranks had them.", _sum_over_ranks),
    Patch(
        "deepspeed.runtime.pipe.engine",
        "PipelineEngine._INSTRUCTION_MAP",
        "The next stage sends how a gradient is divided over ranks of tensor parallelism. It is divided as the "
        "activation, which has the same shape.",
        _receive_from_next_stage,
    ),
    Patch(
        "deepspeed.runtime.utils",
        "PartitionedTensor.from_meta.__func__.__defaults__",
        "DeepSpeed took this default from the host's own accelerator, when it was imported.",
        instead((NAME,)),
    ),
)


# Memory that operators take on a processor beside their results, noted in the log of memory.

FORWARD, BACKWARD = "convolution", "convolution_backward"
# A first layer's kernels read an image as it is.
_IMAGE_CHANNELS = 3
_SEGMENTS = 2 * 2**20


def note_made(name: str, args: Sequence[Any], made: Sequence[torch.Tensor], memory: MemoryLog) -> None:
    """Notes the results of a convolution, with what a processor's kernel takes for a time beside them.

    The events have the order in which a CPU allocates and frees.
    """
    rest = list(made)
    if name == FORWARD and rest and _is_copied(rest[0]):
        with_copy = args[0].shape[1] > _IMAGE_CHANNELS
        _through_blocks(memory, args[0] if with_copy else None, rest.pop(0))
    elif name == BACKWARD and rest and _is_copied(args[0]):
        if rest[0].shape == args[1].shape:
            _through_blocks(memory, args[0], rest.pop(0))
        # The weights' gradient needs both tensors in blocks at once.
        copies = [memory.passing(_bytes(each), PROCESSOR) for each in (args[1], args[0])]
        for copy in reversed(copies):
            memory.passed(copy)
    for each in rest:
        memory.made(each)


def note_collective(kind: str, whole: int, memory: MemoryLog) -> None:
    """Notes what a collective of gloo takes for a time. `whole` is the bytes of its larger side."""
    blocks: list[tuple[int, int]] = []
    if kind == "all_gather":
        blocks = [(whole, PROCESSOR), (whole, THREAD)]
    elif kind == "reduce_scatter":
        blocks = [(whole, PROCESSOR), (min(whole, _SEGMENTS), THREAD)]
    elif kind == "all_reduce":
        blocks = [(min(whole, _SEGMENTS), THREAD)]
    numbers = [memory.passing(*block) for block in blocks]
    for number in reversed(numbers):
        memory.passed(number)


def _through_blocks(memory: MemoryLog, source: torch.Tensor | None, result: torch.Tensor) -> None:
    # Notes the copy of a source, the result in blocks, and the plain result.
    copy = None if source is None else memory.passing(_bytes(source), PROCESSOR)
    blocked = memory.passing(_bytes(result), PROCESSOR)
    if copy is not None:
        memory.passed(copy)
    memory.made(result)
    memory.passed(blocked)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_copied(tensor: torch.Tensor) -> bool:
    # Whether a tensor is plain. With its channels last, kernels take it as it is.
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.dim())
    return last is None or not tensor.is_contiguous(memory_format=last) or tensor.is_contiguous()


# Collectives of the pretended world: they take no time, move nothing, and are noted with their bytes and group.

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


def note_transfer(func: Any, args: Any, operations: OperationLog) -> None:
    kind, position = _KINDS.get(func._opname, ("", 0))
    if not kind:
        return
    tensors = list(tensors_in(args[position]))
    if tensors:
        moved = sum(each.numel() * each.element_size() for each in tensors)
        operations.transfer(kind, tensors[0], moved, _group_of(args))


def pretend_collective(func: Any, args: Any, kwargs: Any, operations: OperationLog, memory: MemoryLog) -> Any:
    """Notes a collective of fake tensors, and returns what its operator returns, with work that is done.

    Known numbers of a tensor that is broadcast, reduced or gathered stay known, as if all ranks had the same.
    """
    note_transfer(func, args, operations)
    name = func._opname
    if name in _GATHER:
        for gathered, given in _gathered(args):
            memory.name(gathered, BUFFER)
            known_numbers.gather(gathered, given)
    elif name in _EXCHANGE:
        _exchange(args)
    elif name in _RECEIVE:
        for each in tensors_in(args[0]):
            known_numbers.forget(each)
    elif name in _REDUCE:
        # A sum of ones is as many as there are ranks.
        for each in tensors_in(args[0]):
            if not known_numbers.is_known(each):
                known_numbers.forget(each)
    kind, position = _KINDS.get(name, ("", 0))
    if kind:
        whole = sum(each.numel() * each.element_size() for each in tensors_in(args[position]))
        note_collective(kind, whole, memory)
    work = FakeWork().boxed()
    returns = len(func._schema.returns)
    return work if returns == 1 else (args[0], work)


def _gathered(args: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    outputs, inputs = (each if isinstance(each, (list, tuple)) else [each] for each in args[:2])
    for output, given in zip(outputs, inputs, strict=True):
        for gathered in tensors_in(output):
            yield gathered, given


def _exchange(args: Any) -> None:
    # Lets what rank 0 receives be known if what it gives is. All ranks give it what it gives to itself.
    received, given = args[:2]
    if isinstance(given, torch.Tensor):
        sizes = args[4]
        first = sizes[0] if sizes else len(given) // len(_group_of(args))
        known = known_numbers.known_numbers(given) if isinstance(given, FakeTensor) else given
        if known is None:
            known_numbers.forget(received)
        else:
            known_numbers.gather(received, known[:first])
        return
    for each in received:
        known_numbers.gather(each, given[0])


def _group_of(args: Any) -> Sequence[int]:
    # The ranks of a collective's group.
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                return torch.distributed.get_process_group_ranks(ProcessGroup.unbox(each))
            except (RuntimeError, TypeError):
                continue
    return (0,)
