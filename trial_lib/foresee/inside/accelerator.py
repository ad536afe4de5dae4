"""DeepSpeed's accelerator for the pretended device. With it, DeepSpeed's engine does what it does on a GPU."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from trial_lib.foresee.inside import pretended_device
from trial_lib.foresee.inside.memory_log import MemoryLog

_NAME = pretended_device.NAME


class ForeseenAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """The pretended device as DeepSpeed's engine sees it.

    Args:
        memory: the log, which answers questions about memory.
        device_bytes: memory of the device.
        devices: on this host.
    """

    _torch_pins_host_memory = True

    def __init__(self, memory: MemoryLog, device_bytes: int, devices: int) -> None:
        super().__init__()
        self._name = _NAME
        self._communication_backend_name = "fake"
        self._memory, self._device_bytes, self._devices = memory, device_bytes, devices
        self._streams = [pretended_device.Stream()]

    def is_synchronized_device(self) -> bool:
        """A GPU works beside its host."""
        return False

    def use_host_timers(self) -> bool:
        """There are no events to read."""
        return True

    def resolves_data_dependency(self) -> bool:
        """As on a GPU, tensors are recorded on streams."""
        return False

    def handles_memory_backpressure(self) -> bool:
        """As on a GPU."""
        return False

    def device_name(self, device_index: int | None = None) -> str:
        """Returns the device's name, as tensors take it."""
        return _NAME if device_index is None else f"{_NAME}:0"

    def device(self, device_index: int | None = None) -> Any:
        """Returns a context that selects the device."""
        return contextlib.nullcontext()

    def current_device(self) -> int:
        """Returns the number of this rank's device."""
        return 0

    def current_device_name(self) -> str:
        """Returns this rank's device."""
        return f"{_NAME}:0"

    def device_count(self) -> int:
        """Returns the number of devices of this host."""
        return self._devices

    @property
    def Stream(self) -> type:
        """The class of its streams."""
        return pretended_device.Stream

    @property
    def Event(self) -> type:
        """The class of its events."""
        return pretended_device.Stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Returns a context in which work goes to the stream, and memory comes from its pool."""
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
        """Returns the stream that work goes to."""
        return self._streams[self._memory.stream]

    def default_stream(self, device_index: int | None = None) -> Any:
        """Returns the stream that computes."""
        return self._streams[0]

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the bytes of live storages on the device."""
        return self._memory.live_bytes

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the peak of live bytes on the device."""
        return self._memory.peak_bytes

    memory_cached = memory_reserved = memory_allocated
    max_memory_cached = max_memory_reserved = max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Returns the two figures that programs read."""
        return {
            "allocated_bytes.all.current": self._memory.live_bytes,
            "allocated_bytes.all.peak": self._memory.peak_bytes,
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes of the device."""
        return self._device_bytes

    def available_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes that are left."""
        return max(0, self._device_bytes - self._memory.live_bytes)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Does nothing: a state of the device's is no part of a foreseen run."""

    def is_fp16_supported(self) -> bool:
        """As on a GPU."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """As on a GPU."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is on the device."""
        return tensor.device.type == _NAME

    def create_op_builder(self, op_name: str) -> Any:
        """Returns a builder; none for collectives by shared memory, which a GPU has not."""
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


def install(memory: MemoryLog, device_bytes: int, devices: int) -> None:
    """Makes DeepSpeed use the pretended device. Call it before the program imports DeepSpeed.

    Args:
        memory: the log.
        device_bytes: memory of the device.
        devices: on this host.
    """
    set_accelerator(ForeseenAccelerator(memory, device_bytes, devices))
