"""Stand-ins for DeepSpeed's compiled ops. They compute nothing, and note the work that the op does."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from deepspeed.accelerator import get_accelerator

from trial_lib.foresee.inside import known_numbers
from trial_lib.foresee.inside.asks import CannotForeseeError
from trial_lib.foresee.inside.operation_log import OperationLog
from trial_lib.intercept.stand_in import stand_in

# Arithmetic of Adam for one parameter, roughly: two moments, a root, a division and the step.
_ADAM_FLOPS = 15
# Marks memory of the host that was locked for a disk.
_LOCKED = "_foreseen_locked"


class _FusedAdam:
    """The op of `FusedAdam` (deepspeed/ops/adam/fused_adam.py)."""

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations

    def multi_tensor_adam(self, chunk: int, overflow: Any, tensors: list[list[torch.Tensor]], *settings: Any) -> None:
        """Notes the update of all parameters."""
        _note_lists(self._operations, tensors)


class _FusedLion:
    """The op of `FusedLion` (deepspeed/ops/lion/fused_lion.py), which has one moment."""

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations

    def multi_tensor_lion(self, chunk: int, overflow: Any, tensors: list[list[torch.Tensor]], *settings: Any) -> None:
        """Notes the update of all parameters."""
        _note_lists(self._operations, tensors)


class _FusedLamb:
    """The op of `FusedLamb` (deepspeed/ops/lamb/fused_lamb.py), which updates one parameter at a time."""

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations

    def lamb(self, parameter: torch.Tensor, copy: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Notes the update of a parameter. Returns the ratio that it is scaled by."""
        first, second, gradient = arguments[:3]
        _note_lists(self._operations, [[gradient], [parameter], [first], [second]])
        return parameter.new_ones(1)


class _Quantizer:
    """The op of ZeRO++ (deepspeed/ops/csrc/quantization/pt_binding.cpp): what it makes has other sizes than its input.

    Groups of numbers have a scale each. Numbers of 4 bits are kept in pairs.
    """

    Symmetric, Asymmetric = 0, 1

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        raise CannotForeseeError(f"DeepSpeed's quantizer has no stand-in for {name} under fake tensors.")

    def quantize(self, numbers: torch.Tensor, groups: int, bits: int, kind: int) -> list[torch.Tensor]:
        """Returns the numbers in bytes, and the scales."""
        *rows, last = numbers.shape
        return self._made(numbers, (*rows, last * bits // 8), groups, kind)

    def swizzle_quant(
        self, numbers: torch.Tensor, groups: int, bits: int, kind: int, *places: int
    ) -> list[torch.Tensor]:
        """Returns the numbers in bytes, in the order in which machines exchange them, and the scales."""
        return self._made(numbers, (numbers.numel() * bits // 8,), groups, kind)

    def quantized_reduction(
        self, numbers: torch.Tensor, scales: torch.Tensor, groups: int, left: int, bits: int, kind: int, devices: int
    ) -> list[torch.Tensor]:
        """Returns the sum over the devices of a host in bytes, and the scales."""
        *rows, last = numbers.shape
        return self._made(numbers, (*rows, last // devices), left, kind)

    def dequantize(
        self, numbers: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int
    ) -> torch.Tensor:
        """Returns numbers of half precision."""
        return self._widened(numbers, bits, torch.float16)

    def dequantize_fp32(
        self, numbers: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int
    ) -> torch.Tensor:
        """Returns numbers of single precision."""
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
    """Notes an update that reads the first list, and reads and writes all others."""
    gradients, parameters, *states = tensors
    for each in (one for part in (parameters, *states) for one in part):
        known_numbers.forget(each)
    numbers = sum(each.numel() for each in parameters)
    read = sum(each.numel() * each.element_size() for each in gradients)
    written = sum(each.numel() * each.element_size() for part in (parameters, *states) for each in part)
    operations.work("update", parameters[0], float(_ADAM_FLOPS * numbers), float(read + 2 * written), False)


class _HostOptimizer:
    """The op of an optimizer on the host, such as `DeepSpeedCPUAdam` (deepspeed/ops/adam/cpu_adam.py)."""

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith(("create_", "destroy_")) and not name.endswith(("_update", "_rollback")):
            raise AttributeError(name)
        return self._note if name.endswith("_update") else _does_nothing

    def _note(self, *arguments: Any) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        parameter = tensors[0]
        for each in tensors:
            if each is not tensors[1]:
                known_numbers.forget(each)
        moved = sum(each.numel() * each.element_size() * (1 if each is tensors[1] else 2) for each in tensors)
        self._operations.work("update", parameter, float(_ADAM_FLOPS * parameter.numel()), float(moved), True)


class _Disk:
    """The ops that swap states to NVMe (deepspeed/ops/csrc/aio). No byte is read or written."""

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations

    def aio_handle(self, *settings: Any, **named: Any) -> "_DiskHandle":
        """Returns what reads and writes files."""
        return _DiskHandle(self._operations)

    gds_handle = pin_handle = aio_handle


class _DiskHandle:
    """Reads and writes files. The locked memory that it gives out has the size that is asked for."""

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations
        self._begun: list[str] = []

    def async_pread(self, buffer: torch.Tensor, *place: Any) -> int:
        """Begins to read a file. Its numbers are unknown."""
        known_numbers.forget(buffer)
        return self._begin("from_disk", buffer)

    def async_pwrite(self, buffer: torch.Tensor, *place: Any) -> int:
        """Begins to write a file."""
        return self._begin("to_disk", buffer)

    def _begin(self, kind: str, buffer: torch.Tensor) -> int:
        self._begun.append(kind)
        self._operations.swap(kind, buffer)
        return 0

    def wait(self) -> int:
        """Waits for what was begun, and returns how many files that are."""
        begun, self._begun = self._begun, []
        for kind in sorted(set(begun)):
            self._operations.swapped(kind)
        return len(begun)

    def new_cpu_locked_tensor(self, numbers: int, example: torch.Tensor) -> torch.Tensor:
        """Returns a block of locked memory."""
        made = torch.empty(numbers, dtype=example.dtype, device="cpu")
        setattr(made.untyped_storage(), _LOCKED, True)
        return made

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Gives a block back. It goes with its last name."""
        return True

    def pin_device_tensor(self, buffer: torch.Tensor) -> bool:
        """Locks memory of the device."""
        return True

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Returns whether a block is locked."""
        return hasattr(buffer.untyped_storage(), _LOCKED) or get_accelerator().is_pinned(buffer)


def _does_nothing(*arguments: Any) -> None: ...


_KERNELS = {
    "fused_adam": _FusedAdam,
    "cpu_adam": _HostOptimizer,
    "cpu_adagrad": _HostOptimizer,
    "cpu_lion": _HostOptimizer,
    "async_io": _Disk,
    "gds": _Disk,
    "pin_memory": _Disk,
}


# DeepSpeed binds these names to an op that is not there when it is imported without CUDA.
_OF_CUDA = {"FusedLambBuilder": _FusedLamb, "FusedLionBuilder": _FusedLion, "QuantizerBuilder": _Quantizer}


def install(operations: OperationLog) -> None:
    """Makes DeepSpeed's builders load stand-ins, so that nothing is compiled. Call it after DeepSpeed's import."""
    from deepspeed.ops import op_builder
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.cpu import NotImplementedBuilder
    from deepspeed.utils import nvtx

    # No profiler looks on. Stage 3 would mark hundreds of thousands of ranges, each by several calls.
    nvtx.enable_nvtx = False

    def load(builder: Any, verbose: bool = True) -> Any:
        """Replaces `OpBuilder.load`."""
        kernel = _KERNELS.get(builder.NAME)
        if kernel is None:
            raise CannotForeseeError(f"DeepSpeed's op {builder.NAME} has no stand-in under fake tensors.")
        return kernel(operations)

    def refuse(builder: Any, verbose: bool = True) -> NoReturn:
        """Replaces `load` of what DeepSpeed has for CUDA alone."""
        raise CannotForeseeError("the program needs an op that DeepSpeed has for CUDA alone, without a stand-in.")

    OpBuilder.load = load
    NotImplementedBuilder.load = refuse
    for name, kernel_of in _OF_CUDA.items():
        stand_in(name, getattr(op_builder, name), functools.partial(_Builder, kernel_of(operations)))


class _Builder:
    """Loads a stand-in for an op that DeepSpeed builds for CUDA alone."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def load(self, verbose: bool = True) -> Any:
        return self._kernel
