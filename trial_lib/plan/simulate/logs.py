"""The logs of a foreseen run: the life of each storage, and the operations in the order of their issue."""

import array
import ctypes
import os
import sys
import traceback
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.flop_counter import flop_registry

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.foreseen_run import (
    KINDS,
    MOMENTS,
    OPERATIONS,
    PLACES,
    MemoryEvent,
    Moment,
    Operation,
    Storage,
)
from zerotune.trial_lib.rank import device
from zerotune.trial_lib.rank.endings import named_refusal
from zerotune.trial_lib.rank.user_program import may_be_of_the_user

DEVICE = "foreseen"
"""The type of the pretended device, as `tensor.device.type` shows it."""

# The log of memory: the life of each storage, its kind and its place.

PARAMETER, GRADIENT, OPTIMIZER, ACTIVATION, BUFFER, INPUT, TEMPORARY = range(len(KINDS))
INITIALIZE, LOAD, FORWARD, BACKWARD, UPDATE, BETWEEN = range(len(MOMENTS))
_DEVICE, _HOST, _PINNED, PROCESSOR, THREAD = range(len(PLACES))
# The kind of a storage that nothing else names, by the moment in which it was made.
_KIND_OF = {
    INITIALIZE: BUFFER,
    LOAD: INPUT,
    FORWARD: ACTIVATION,
    BACKWARD: TEMPORARY,
    UPDATE: TEMPORARY,
    BETWEEN: TEMPORARY,
}


class _Life(weakref.ref[Any]):
    """A weak reference to a storage that knows which one it was."""

    __slots__ = ("address", "index")
    address: int
    index: int


class MemoryLog:
    """Notes storages as they are made and freed.

    Streams number from 0, which is the one that computes.
    """

    def __init__(self, device: str = DEVICE) -> None:
        self._device = device
        self.live_bytes = self.peak_bytes = 0
        self.stream = 0
        self._sizes: list[int] = []
        self._kinds = bytearray()
        self._places = bytearray()
        self._streams = bytearray()
        # Plus and minus the index from 1.
        self._events = array.array("q")
        self._made_at = array.array("q")
        self._living: dict[int, _Life] = {}
        self._moments: list[Moment] = []
        self._kind = BUFFER

    def begin(self, moment: int, step: int, micro_batch: int, operation: int) -> None:
        """Begins a part of the run, at the index of its first operation."""
        self._kind = _KIND_OF[moment]
        self._moments.append(Moment(moment, step, micro_batch, len(self._events), operation))

    def made(self, tensor: torch.Tensor, kind: int | None = None) -> None:
        """Notes the storage of a new fake tensor, once. None stands for the kind of the moment."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._living:
            return
        life = self._living[address] = _Life(storage, self._freed)
        life.address = address
        size, kind = storage.nbytes(), self._kind if kind is None else kind
        if tensor.device.type == self._device:
            life.index = self._add(size, kind, _DEVICE, self.stream)
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        else:
            life.index = self._add(size, kind, _HOST)

    def _add(self, size: int, kind: int, place: int, stream: int = 0) -> int:
        index = len(self._sizes)
        self._sizes.append(size)
        self._kinds.append(kind)
        self._places.append(place)
        self._streams.append(stream)
        self._made_at.append(len(self._events))
        self._events.append(index + 1)
        return index

    def made_from_data(self, tensor: torch.Tensor) -> None:
        """A tensor that the program has copied from numbers of the host: a batch, if it is between the passes."""
        self.made(tensor, INPUT if self._moments and self._moments[-1].name == BETWEEN else None)

    def _freed(self, life: "_Life") -> None:
        if self._living.get(life.address) is life:
            del self._living[life.address]
        self._events.append(-life.index - 1)
        if self._places[life.index] == _DEVICE:
            self.live_bytes -= self._sizes[life.index]

    def passing(self, size: int, place: int) -> int:
        """Notes a block (`PROCESSOR` or `THREAD`) that a processor takes beside an operator's results. Returns its
        number.
        """
        return self._add(size, TEMPORARY, place)

    def passed(self, number: int) -> None:
        self._events.append(-number - 1)

    def name(self, tensor: Any, kind: int) -> None:
        """Names the kind of a tensor's storage. The last name counts."""
        life = self._life_of(tensor)
        if life is not None:
            self._kinds[life.index] = kind

    def pinned(self, tensor: torch.Tensor) -> None:
        life = self._life_of(tensor)
        if life is not None:
            self._places[life.index] = _PINNED

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        life = self._life_of(tensor)
        return life is not None and self._places[life.index] == _PINNED

    def _life_of(self, tensor: Any) -> "_Life | None":
        return self._living.get(tensor.untyped_storage()._cdata) if isinstance(tensor, torch.Tensor) else None

    def record(self) -> tuple[tuple[Storage, ...], tuple[MemoryEvent, ...], tuple[Moment, ...]]:
        # At a deadline another thread records, and the program goes on. Each event is of a storage that is listed.
        events = tuple(MemoryEvent(abs(each) - 1, int(each > 0)) for each in self._events[:])
        storages = tuple(map(Storage, self._sizes, self._kinds_at_end(), self._places, self._streams))
        return storages, events, tuple(self._moments)

    def _kinds_at_end(self) -> bytearray:
        # The kinds. What the forward pass makes and frees again is no activation.
        kinds = bytearray(self._kinds)
        bounds = [*(moment.event for moment in self._moments), len(self._events)]
        for position, moment in enumerate(self._moments):
            if moment.name != FORWARD:
                continue
            for event in self._events[bounds[position] : bounds[position + 1]]:
                if event < 0 and kinds[-event - 1] == ACTIVATION and self._made_at[-event - 1] >= moment.event:
                    kinds[-event - 1] = TEMPORARY
        return kinds


# The cost of an operation: its class, its FLOPs, and the bytes that it moves.

INDEX = {name: index for index, name in enumerate(OPERATIONS)}
# Parts of names, in the order in which they are tried, and words between underscores.
_PARTS = (
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention")),
    ("convolution", ("convolution", "conv1d", "conv2d", "conv3d")),
    ("norm", ("layer_norm", "rms_norm", "batch_norm", "group_norm")),
    ("embedding", ("embedding",)),
    ("loss", ("nll_loss", "cross_entropy", "mse_loss", "log_softmax", "binary_cross")),
    ("update", ("fused_adam", "fused_sgd", "multi_tensor", "optimizer_update")),
)
_WORDS = (
    ("elementwise", {"clamp"}),
    (
        "matmul",
        {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "matmul", "linear", "einsum", "dot", "gemm", "gemv"},
    ),
    (
        "reduction",
        {"sum", "mean", "norm", "amax", "amin", "max", "min", "softmax", "var", "std", "argmax", "any", "all", "topk"},
    ),
    ("copy", {"copy", "clone", "cat", "stack", "index", "gather", "scatter", "slice", "select", "pad", "contiguous"}),
)
# Neither reads nor writes anything.
_NO_WORK = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "resize_",
    "set_",
    "_assert_async",
)
# In place, but without a look at what was there.
_OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
# Values of `custom_mask_type` of the memory-efficient kernel: causal from the top left, or from the bottom right.
_CAUSAL_MASKS = (1, 2)


def class_of(name: str) -> int:
    for kind, parts in _PARTS:
        if any(part in name for part in parts):
            return INDEX[kind]
    words = set(name.split("_"))
    for kind, known in _WORDS:
        if words & known:
            return INDEX[kind]
    return INDEX["elementwise"]


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes behind a tensor. An expanded one has fewer than its shape says."""
    size: int = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size


def cost_of(
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    out: Any,
    dtypes: list[str],
) -> tuple[int, int, float, float, int] | None:
    """Kind, dtype, FLOPs, bytes and whether the host does it; None for an operator that moves nothing.

    `made` are outputs with storages of their own. A new number format is added to `dtypes`.
    """
    name = func._opname
    if name in _NO_WORK:
        return None
    is_mutating = func._schema.is_mutable
    if not made and not is_mutating:
        return None
    kind = class_of(name)
    first = inputs[0] if inputs else made[0]
    is_on_device = any(each.device.type == DEVICE for each in (*inputs, *made))
    if name in ("_to_copy", "copy_") or name.startswith("_to_copy"):
        # What has no device but a shape stays where its inputs are.
        places = [each.device.type for each in (*inputs, *made) if each.device.type != "meta"]
        kinds = {place == DEVICE for place in places}
        if len(kinds) == 2:
            target = made[0] if made else inputs[0]
            to_device = target.device.type == DEVICE
            kind = INDEX["to_device" if to_device else "to_host"]
            source = inputs[0] if made else next((each for each in inputs[1:]), target)
            # Torch changes the format on the host, in pages that are not locked (aten/src/ATen/native/cuda/Copy.cu).
            changed = bytes_of(source) + bytes_of(target) if source.dtype != target.dtype else 0
            sent = bytes_of(target if to_device else source)
            return kind, _dtype(first, dtypes), float(changed), float(sent), 0
    # Bytes: of all inputs and outputs, but only the rows that an embedding reads.
    if name == "embedding":
        moved = 2.0 * bytes_of(made[0]) + bytes_of(inputs[1])
    else:
        moved = float(sum(map(bytes_of, inputs)) + sum(map(bytes_of, made)))
        if is_mutating and inputs and name not in _OVERWRITES and func._overloadname != "out":
            moved += bytes_of(inputs[0])
    # FLOPs: by torch's formula, or one for each number.
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        flops = float(formula(*args, **kwargs, out_val=out))
    else:
        flops = float(max((each.numel() for each in (*inputs, *made)), default=0))
    if name == "embedding":
        flops = 0.0
    if kind == INDEX["attention"] and not _is_causal(func, args, kwargs):
        kind = INDEX["whole_attention"]
    return kind, _dtype(first, dtypes), flops, moved, int(not is_on_device)


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    # Whether a kernel of attention leaves out what lies behind each position. One that is unknown does.
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "custom_mask_type" in names:
        return given.get("custom_mask_type", 0) in _CAUSAL_MASKS
    return bool(given.get("is_causal", False)) or "is_causal" not in names


def _dtype(tensor: torch.Tensor, dtypes: list[str]) -> int:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in dtypes:
        dtypes.append(name)
    return dtypes.index(name)


# The log of operations, in the order in which the program issues them, each with the module that issues it.

# What matrix units do, with the question whether they may take 32-bit numbers for TF32 then.
_TF32 = {
    INDEX["matmul"]: device.allows_products,
    INDEX["attention"]: device.allows_products,
    INDEX["whole_attention"]: device.allows_products,
    INDEX["convolution"]: device.allows_convolutions,
}


_COPIES = {INDEX["to_device"], INDEX["to_host"]}


class OperationLog:
    """Notes operations, with the formats of their numbers and their modules by index."""

    def __init__(self) -> None:
        self.dtypes: list[str] = []  # `tf32` stands for 32-bit numbers that are multiplied in it
        self.modules: list[str] = [""]
        # Kind, dtype, FLOPs, bytes, ranks, module, on host; for a transfer also how far ranks are apart.
        self.rows: list[tuple[Any, ...]] = []
        self._index: dict[int, int] = {}
        self._stack: list[int] = [0]

    def __len__(self) -> int:
        return len(self.rows)

    def note(self, cost: tuple[int, int, float, float, int]) -> None:
        kind, dtype, flops, moved, on_host = cost
        if (allowed := _TF32.get(kind)) and self.dtypes[dtype] == "float32" and not on_host and allowed():
            dtype = self._index_of("tf32")
        row = (kind, dtype, flops, moved, 1, self._stack[-1], on_host)
        changed = [(INDEX["copy"], dtype, 0.0, flops, 1, row[-2], 1)] if kind in _COPIES and flops else []
        self.rows += [row, *changed] if kind == INDEX["to_host"] else [*changed, row]

    def cost(self, func: Any, args: Any, kwargs: Any, inputs: Any, made: Any, out: Any) -> Any:
        return cost_of(func, args, kwargs, inputs, made, out, self.dtypes)

    def transfer(self, kind: str, tensor: torch.Tensor, moved: float, ranks: Sequence[int]) -> None:
        """Notes a transfer between ranks, with the bytes of the whole tensor on this rank."""
        self._add(kind, self.dtype(tensor), moved, 0.0, len(ranks))
        self.rows[-1] += (ranks[1] - ranks[0] if len(ranks) > 1 else 0,)

    def work(self, kind: str, tensor: torch.Tensor, flops: float, moved: float, on_host: bool) -> None:
        self._add(kind, self.dtype(tensor), moved, flops, on_host=int(on_host))

    def moved_to_device(self, tensor: torch.Tensor) -> None:
        self.swap("to_device", tensor)

    def swap(self, kind: str, tensor: torch.Tensor) -> None:
        """Notes that a tensor begins to be read from a disk, or written to it."""
        self._add(kind, self.dtype(tensor), tensor.numel() * tensor.element_size())

    def swapped(self, kind: str) -> None:
        """Notes that the program waits for all that it began to read, or to write."""
        self._add(kind, 0, 0)

    def _add(self, kind: str, dtype: int, moved: float, flops: float = 0.0, ranks: int = 1, on_host: int = 0) -> None:
        self.rows.append((INDEX[kind], dtype, flops, float(moved), ranks, self._stack[-1], on_host))

    def dtype(self, tensor: torch.Tensor) -> int:
        return self._index_of(str(tensor.dtype).removeprefix("torch."))

    def _index_of(self, name: str) -> int:
        if name not in self.dtypes:
            self.dtypes.append(name)
        return self.dtypes.index(name)

    def multiplied_in(self) -> tuple[str, ...]:
        """The number formats of all products of matrices so far, in order of their names."""
        return tuple(sorted({self.dtypes[row[1]] for row in self.rows if row[0] in _TF32}))

    def name_modules(self, module: nn.Module) -> None:
        for name, each in module.named_modules():
            if id(each) not in self._index:
                self._index[id(each)] = len(self.modules)
                self.modules.append(name)

    def install(self) -> None:
        def before(module: nn.Module, inputs: Any) -> None:
            self._stack.append(self._index.get(id(module), self._stack[-1]))

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if len(self._stack) > 1:
                self._stack.pop()

        torch_modules.register_module_forward_pre_hook(before)
        torch_modules.register_module_forward_hook(after, always_call=True)

    def record(self) -> tuple[Operation, ...]:
        return tuple(Operation(*row) for row in self.rows)


class _HeapFigures(ctypes.Structure):
    """The figures of mallinfo2(3), of which two are used: bytes in mapped blocks, and in all others."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "k")
    ]


def heap_bytes() -> int:
    """The bytes that the program holds of the C library's heap; 0 if that library does not show it."""
    figures = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if figures is None:
        return 0
    figures.restype = _HeapFigures
    found = figures()
    return int(found.hblkhd + found.uordblks)


# Lines of the user's own program, among those of libraries.

_LIBRARY = f"{os.sep}lib{os.sep}python"
_OWN = f"{os.sep}trial_lib{os.sep}"
_MOST_CHARACTERS = 300


def is_of_program(path: str) -> bool:
    """Whether a file is the user's: neither Python's, nor a package's, nor ZeroTune's."""
    return may_be_of_the_user(path) and _LIBRARY not in path and _OWN not in path


def place_in_program() -> str:
    """`FILE:LINE` of the innermost frame that is the user's; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_program(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def sentence_of(error: BaseException) -> str:
    """What went wrong, with the last line of the user's own code that led to it.

    What DeepSpeed refuses is in its configuration, and not in the line.
    """
    if refused := named_refusal(error):
        return refused
    if type(error).__name__ == "CannotForeseeError":
        return str(error).strip().splitlines()[0]
    said, root, remedy = _named(error), error, ""
    if isinstance(error, InputError):
        said, remedy = error.what, f" {error.remedy}"
    while root.__cause__ is not None:
        root = root.__cause__
    because = "" if root is error else f", because of {_named(root)}".rstrip(".")
    raised = reversed(list(traceback.walk_tb(error.__traceback__)))
    # Torch's own code may have called what has raised it, and the user's code torch.
    place = line_of(raised) or line_of(traceback.walk_stack(None))
    return f"{said.rstrip('.')}{because}{place}.{remedy}"


def _named(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)[:_MOST_CHARACTERS]


def line_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """`, at FILE:LINE` of the first frame that may be the user's; empty if there is none."""
    for frame, line in frames:
        if is_of_program(frame.f_code.co_filename):
            return f", at {frame.f_code.co_filename}:{line}"
    return ""
