"""DeepSpeed's accelerator for the pretended device. With it, DeepSpeed's engine does what it does on a GPU."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from zerotune.trial_lib.plan.simulate import known_numbers, pretended_device
from zerotune.trial_lib.plan.simulate.asks import CannotForeseeError
from zerotune.trial_lib.plan.simulate.fake_tensors import FakeTensors
from zerotune.trial_lib.plan.simulate.logs import MemoryLog, OperationLog
from zerotune.trial_lib.rank.patching import Change, Patch, Table, instead, with_given

_NAME = pretended_device.NAME


class ForeseenAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """The pretended device as DeepSpeed's engine sees it. It answers as a GPU, and about memory from the log."""

    _torch_pins_host_memory = True

    def __init__(self, memory: MemoryLog, device_bytes: int, devices: int) -> None:
        super().__init__()
        self._name = _NAME
        self._communication_backend_name = "fake"
        self._memory, self._device_bytes, self._devices = memory, device_bytes, devices
        self._streams = [pretended_device.Stream()]

    def is_synchronized_device(self) -> bool:
        return False

    resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def use_host_timers(self) -> bool:
        return True  # there are no events to read

    is_fp16_supported = use_host_timers

    def device_name(self, device_index: int | None = None) -> str:
        return _NAME if device_index is None else f"{_NAME}:0"

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{_NAME}:0"

    def device_count(self) -> int:
        return self._devices

    @property
    def Stream(self) -> type:
        return pretended_device.Stream

    Event = Stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Work goes to the stream, and memory comes from its pool."""
        before = self._memory.stream
        if stream is not None:
            if stream not in self._streams:
                self._streams.append(stream)
            self._memory.stream = self._streams.index(stream)
        try:
            yield
        finally:
            self._memory.stream = before

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._streams[self._memory.stream]

    def default_stream(self, device_index: int | None = None) -> Any:
        return self._streams[0]

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory.live_bytes

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory.peak_bytes

    memory_cached = memory_reserved = memory_allocated
    max_memory_cached = max_memory_reserved = max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self._memory.live_bytes,
            "allocated_bytes.all.peak": self._memory.peak_bytes,
        }

    def total_memory(self, device_index: int | None = None) -> int:
        return self._device_bytes

    def available_memory(self, device_index: int | None = None) -> int:
        return max(0, self._device_bytes - self._memory.live_bytes)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """A state of the device's is no part of a foreseen run."""

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == _NAME

    def create_op_builder(self, op_name: str) -> Any:
        """None for collectives by shared memory, which a GPU has not."""
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self._memory.pinned(pinned)
        return pinned

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        pinned = tensor.new_empty(shape)
        self._memory.pinned(pinned)
        return pinned

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._memory.is_pinned(tensor)


def _typed(dtype: torch.dtype) -> property:
    def make(self: Any) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device=f"{_NAME}:0")

    return property(make)


for _type_name, _dtype in {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}.items():
    setattr(ForeseenAccelerator, _type_name, _typed(_dtype))


# Stand-ins for DeepSpeed's compiled ops. They compute nothing, and note the work that the op does.

# Arithmetic of Adam for one parameter, roughly: two moments, a root, a division and the step.
_ADAM_FLOPS = 15
# Marks memory of the host that was locked for a disk.
_LOCKED = "_foreseen_locked"


class _Op:
    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations


class _FusedLists(_Op):
    """The ops of `FusedAdam` and `FusedLion` (deepspeed/ops/adam/fused_adam.py, deepspeed/ops/lion/fused_lion.py)."""

    def multi_tensor_adam(self, chunk: int, overflow: Any, tensors: list[list[torch.Tensor]], *settings: Any) -> None:
        _note_lists(self._operations, tensors)

    multi_tensor_lion = multi_tensor_adam  # of one moment


class _FusedLamb(_Op):
    """The op of `FusedLamb` (deepspeed/ops/lamb/fused_lamb.py), which updates one parameter at a time."""

    def lamb(self, parameter: torch.Tensor, copy: torch.Tensor, *arguments: Any) -> torch.Tensor:
        first, second, gradient = arguments[:3]
        _note_lists(self._operations, [[gradient], [parameter], [first], [second]])
        return parameter.new_ones(1)


class _Quantizer(_Op):
    """The op of ZeRO++ (deepspeed/ops/csrc/quantization/pt_binding.cpp): what it makes has other sizes than its input.

    Groups of numbers have a scale each. Numbers of 4 bits are kept in pairs.
    """

    Symmetric, Asymmetric = 0, 1

    def __getattr__(self, name: str) -> Any:
        raise CannotForeseeError(f"DeepSpeed's quantizer has no stand-in for {name} under fake tensors.")

    def quantize(self, numbers: torch.Tensor, groups: int, bits: int, kind: int) -> list[torch.Tensor]:
        *rows, last = numbers.shape
        return self._made(numbers, (*rows, last * bits // 8), groups, kind)

    def swizzle_quant(
        self, numbers: torch.Tensor, groups: int, bits: int, kind: int, *places: int
    ) -> list[torch.Tensor]:
        """In the order in which machines exchange them."""
        return self._made(numbers, (numbers.numel() * bits // 8,), groups, kind)

    def quantized_reduction(
        self, numbers: torch.Tensor, scales: torch.Tensor, groups: int, left: int, bits: int, kind: int, devices: int
    ) -> list[torch.Tensor]:
        *rows, last = numbers.shape
        return self._made(numbers, (*rows, last // devices), left, kind)

    def dequantize(
        self, numbers: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int
    ) -> torch.Tensor:
        return self._widened(numbers, bits, torch.float16)

    def dequantize_fp32(
        self, numbers: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int
    ) -> torch.Tensor:
        return self._widened(numbers, bits, torch.float32)

    def _made(self, numbers: torch.Tensor, shape: tuple[int, ...], groups: int, kind: int) -> list[torch.Tensor]:
        made = torch.empty(shape, dtype=torch.int8, device=numbers.device)
        scales = torch.empty(groups, 1 if kind == self.Symmetric else 2, dtype=torch.float32, device=numbers.device)
        self._note(numbers, made)
        return [made, scales]

    def _widened(self, numbers: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
        *rows, last = numbers.shape
        made = torch.empty((*rows, last * 8 // bits), dtype=dtype, device=numbers.device)
        self._note(numbers, made)
        return made

    def _note(self, read: torch.Tensor, written: torch.Tensor) -> None:
        moved = sum(each.numel() * each.element_size() for each in (read, written))
        self._operations.work("elementwise", written, 0.0, float(moved), False)


def _note_lists(operations: OperationLog, tensors: list[list[torch.Tensor]]) -> None:
    # Notes an update that reads the first list, and reads and writes all others.
    gradients, parameters, *states = tensors
    for each in (one for part in (parameters, *states) for one in part):
        known_numbers.forget(each)
    numbers = sum(each.numel() for each in parameters)
    read = sum(each.numel() * each.element_size() for each in gradients)
    written = sum(each.numel() * each.element_size() for part in (parameters, *states) for each in part)
    operations.work("update", parameters[0], float(_ADAM_FLOPS * numbers), float(read + 2 * written), False)


class _HostOptimizer(_Op):
    """The op of an optimizer on the host, such as `DeepSpeedCPUAdam` (deepspeed/ops/adam/cpu_adam.py)."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith(("create_", "destroy_")) and not name.endswith(("_update", "_rollback")):
            raise AttributeError(name)
        return self._note if name.endswith("_update") else lambda *arguments: None

    def _note(self, *arguments: Any) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        parameter = tensors[0]
        for each in tensors:
            if each is not tensors[1]:
                known_numbers.forget(each)
        moved = sum(each.numel() * each.element_size() * (1 if each is tensors[1] else 2) for each in tensors)
        self._operations.work("update", parameter, float(_ADAM_FLOPS * parameter.numel()), float(moved), True)


class _Disk(_Op):
    """The ops that swap states to NVMe (deepspeed/ops/csrc/aio). No byte is read or written."""

    def aio_handle(self, *settings: Any, **named: Any) -> "_DiskHandle":
        return _DiskHandle(self._operations)

    gds_handle = pin_handle = aio_handle


class _DiskHandle:
    """Reads and writes files. The locked memory that it gives out has the size that is asked for."""

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations
        self._begun: list[str] = []

    def async_pread(self, buffer: torch.Tensor, *place: Any) -> int:
        known_numbers.forget(buffer)
        return self._begin("from_disk", buffer)

    def async_pwrite(self, buffer: torch.Tensor, *place: Any) -> int:
        return self._begin("to_disk", buffer)

    def _begin(self, kind: str, buffer: torch.Tensor) -> int:
        self._begun.append(kind)
        self._operations.swap(kind, buffer)
        return 0

    def wait(self) -> int:
        begun, self._begun = self._begun, []
        for kind in sorted(set(begun)):
            self._operations.swapped(kind)
        return len(begun)

    def new_cpu_locked_tensor(self, numbers: int, example: torch.Tensor) -> torch.Tensor:
        made = torch.empty(numbers, dtype=example.dtype, device="cpu")
        setattr(made.untyped_storage(), _LOCKED, True)
        return made

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        return True

    def pin_device_tensor(self, buffer: torch.Tensor) -> bool:
        return True

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return hasattr(buffer.untyped_storage(), _LOCKED) or get_accelerator().is_pinned(buffer)


_KERNELS = {
    "fused_adam": _FusedLists,
    "cpu_adam": _HostOptimizer,
    "cpu_adagrad": _HostOptimizer,
    "cpu_lion": _HostOptimizer,
    "async_io": _Disk,
    "gds": _Disk,
    "pin_memory": _Disk,
}

# DeepSpeed binds these names to an op that is not there when it is imported without CUDA.
_OF_CUDA = {"FusedLambBuilder": _FusedLamb, "FusedLionBuilder": _FusedLists, "QuantizerBuilder": _Quantizer}


class _Builder:
    """Loads a stand-in for an op that DeepSpeed builds for CUDA alone."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def load(self, verbose: bool = True) -> Any:
        return self._kernel


def _load(mode: FakeTensors, original: Any, builder: Any, verbose: bool = True) -> Any:
    kernel = _KERNELS.get(builder.NAME)
    if kernel is None:
        raise CannotForeseeError(f"DeepSpeed's op {builder.NAME} has no stand-in under fake tensors.")
    return kernel(mode.operations)


def _builds(kernel: Any, original: Any, mode: FakeTensors) -> Any:
    return functools.partial(_Builder, kernel(mode.operations))


def _refuse(builder: Any, verbose: bool = True) -> NoReturn:
    raise CannotForeseeError("the program needs an op that DeepSpeed has for CUDA alone, without a stand-in.")


def _set_accelerator(module: Any, mode: FakeTensors) -> None:
    set_accelerator(ForeseenAccelerator(mode.memory, mode.order.device_bytes, mode.order.ranks_per_host))


_COMPILED = "Nothing is compiled. A kernel that computes nothing notes the work of the op."
PATCHES: Table = (
    Change("deepspeed.accelerator", "set_accelerator", "DeepSpeed's engine runs as on a GPU.", _set_accelerator),
    Patch(
        "deepspeed.utils",
        "nvtx.enable_nvtx",
        "No profiler looks on. Stage 3 would mark hundreds of thousands of ranges, each by several calls.",
        instead(False),
    ),
    Patch("deepspeed.ops.op_builder.builder", "OpBuilder.load", _COMPILED, with_given(_load)),
    Patch(
        "deepspeed.ops.op_builder.cpu",
        "NotImplementedBuilder.load",
        "It would not say that an op for CUDA alone has no stand-in.",
        instead(_refuse),
    ),
    *(
        Patch(
            "deepspeed.ops.op_builder",
            name,
            _COMPILED,
            functools.partial(_builds, kernel),
        )
        for name, kernel in _OF_CUDA.items()
    ),
)
