"""A GPU that PyTorch calls `cuda`, including AMD's. Its memory is that of the caching allocator."""

import gc
from typing import Any

import torch

from trial_lib.device.data_sheets import peak_flops, share_of
from trial_lib.device.rank import tf32

# NVIDIA's Ampere generation.
_TF32_SINCE = (8, 0)
_BY_CUDNN = (torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)


class CudaDevice:
    """See `Device`.

    Args:
        index: of the device in this process.
    """

    kind = "cuda"
    is_apart = True

    def __init__(self, index: int) -> None:
        self._index = index
        # The limit. torch reports it only from 2.9 on.
        self._budget: int | None = None

    def used_bytes(self) -> int:
        """Returns the bytes of tensors."""
        return torch.cuda.memory_allocated(self._index)

    def peak_bytes(self) -> int:
        """Returns the peak of the bytes of tensors."""
        return torch.cuda.max_memory_allocated(self._index)

    def available_bytes(self) -> int | None:
        """Returns the free bytes of the device, with the unused bytes that the allocator holds.

        It is never more than the allocator may take in total.
        """
        free, _ = torch.cuda.mem_get_info(self._index)
        used = self.used_bytes()
        return min(int(free + torch.cuda.memory_reserved(self._index)), self.total_bytes()) - used

    def left_bytes(self) -> dict[str, int]:
        """Returns the figures of the driver and of the caching allocator."""
        free, total = torch.cuda.mem_get_info(self._index)
        held = {"reserved": torch.cuda.memory_reserved(self._index), "allocated": self.used_bytes()}
        return {"free": int(free), "total": int(total), **held}

    def total_bytes(self) -> int:
        """Returns the memory of the device, or the allocator's limit if it has one."""
        total = self._memory()
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)(self._index)
        return min(int(total * fraction), total if self._budget is None else self._budget)

    def _memory(self) -> int:
        return int(torch.cuda.get_device_properties(self._index).total_memory)

    def allocator_figures(self) -> dict[str, int]:
        """Returns the most bytes reserved, and how often the allocator had to empty its cache."""
        return {
            "peak_reserved": torch.cuda.max_memory_reserved(self._index),
            "allocator_retries": int(torch.cuda.memory_stats(self._index).get("num_alloc_retries", 0)),
        }

    def forget_peak(self) -> None:
        """Resets the peak. `deepspeed.initialize` briefly takes memory (copies, flattening) that no step needs."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def start_over(self) -> None:
        """Empties the caches of device and pinned memory, and starts peaks and retries here."""
        gc.collect()
        torch.cuda.empty_cache()
        getattr(torch._C, "_accelerator_emptyHostCache", getattr(torch._C, "_host_emptyCache", lambda: None))()
        torch.cuda.reset_peak_memory_stats(self._index)
        # Retries count from the start of the process, so they are reset with all other counters.
        torch.cuda.reset_accumulated_memory_stats(self._index)

    def limit(self, budget: int) -> int:
        """Limits the caching allocator. A program with a limit of its own overrides it."""
        self._budget = budget
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / self._memory()), self._index)
        return budget - self.used_bytes()

    def unlimit(self) -> None:
        """Lets the allocator take the whole device."""
        if self._budget is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self._index)
            self._budget = None

    def keep_what_is_freed(self) -> None:
        """Does nothing, because the allocator keeps freed memory."""

    def finish(self) -> None:
        """Waits for all streams."""
        torch.cuda.synchronize(self._index)

    def instant(self) -> Any:
        """Returns an event that is recorded on the calling thread's stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._index))
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        """Returns the seconds by the device's own clock."""
        return float(start.elapsed_time(end)) / 1e3

    def is_recording(self) -> bool:
        """Returns whether the program captures a CUDA graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def is_busy(self) -> bool:
        """Asks the device by its number. A thread's own is the first one, where asking would take memory."""
        return not torch.cuda.current_stream(self._index).query()

    def multiplies_in_tf32(self, module: Any) -> bool:
        """Returns whether the device has TF32 and torch may use it. For convolutions it may by default."""
        if torch.cuda.get_device_capability(self._index) < _TF32_SINCE:
            return False
        if tf32.allows_products():
            return True
        return any(isinstance(each, _BY_CUDNN) for each in module.modules()) and tf32.allows_convolutions()

    def peak_flops(self, dtype: str) -> float | None:
        """Returns the data sheet's peak; for a slice of a device its share."""
        name = torch.cuda.get_device_name(self._index)
        multiprocessors = torch.cuda.get_device_properties(self._index).multi_processor_count
        return peak_flops(name, dtype, share_of(name, multiprocessors))
