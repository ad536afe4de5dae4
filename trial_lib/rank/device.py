"""A rank's own devices, as PyTorch sees them in the user's environment."""

import contextlib
import ctypes
import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from trial_lib.device.data_sheets import peak_flops, share_of
from trial_lib.messages.errors import InputError

# The interface that every kind of device implements for the rank that trains on it.


class Device(Protocol):
    """The device of a rank."""

    kind: str  # PyTorch's name: `cpu`, `cuda`
    # Whether it works beside the processor that runs the program. Then a call returns before its work is done, and a
    # thread that waits for it may spin.
    is_apart: bool

    def used_bytes(self) -> int:
        """Returns the bytes in use now."""

    def peak_bytes(self) -> int:
        """Returns the most bytes in use at any moment since `start_over` or `forget_peak`."""

    def available_bytes(self) -> int | None:
        """Returns the bytes that this process may still take; None if nothing limits it."""

    def left_bytes(self) -> dict[str, int]:
        """Returns the free bytes (`free`) of all bytes (`total`); empty if nothing limits them.

        If an allocator holds memory back, it also has the bytes `reserved` and, of these, `allocated`.
        """

    def total_bytes(self) -> int:
        """Returns the most bytes that the model may have; 0 if only `limit` decides."""

    def allocator_figures(self) -> dict[str, int]:
        """Returns the allocator's figures beside the peak: bytes reserved, and retries. Empty if it has none."""

    def forget_peak(self) -> None:
        """Starts the peak of the steps here, if the peak of their preparation would hide it."""

    def start_over(self) -> None:
        """Returns free memory, and starts all figures here."""

    def limit(self, budget: int) -> int:
        """Makes every allocation beyond a budget fail, as on a full device. Call it after the imports.

        Args:
            budget: bytes that this rank may use.

        Returns:
            The bytes of the budget that are still free for the model.
        """

    def unlimit(self) -> None:
        """Removes the limit."""

    def keep_what_is_freed(self) -> None:
        """Keeps memory that a step frees with the process, as some tens of steps into a training."""

    def finish(self) -> None:
        """Waits until the device has done its work."""

    def instant(self) -> Any:
        """Returns a moment in the device's own time, without waiting for it."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Returns the seconds from one `instant` to another. Call `finish` first."""

    def is_recording(self) -> bool:
        """Returns whether work is recorded for later. Then nothing is done now, and nothing can be timed."""

    def is_busy(self) -> bool:
        """Returns whether the device has unfinished work."""

    def multiplies_in_tf32(self, module: Any) -> bool:
        """Returns whether 32-bit matrices are multiplied with the mantissa of float16, as the program allows.

        Args:
            module: the model. Convolutions and recurrent layers have a switch of their own.
        """

    def peak_flops(self, dtype: str) -> float | None:
        """Returns the most FLOP/s of its products of matrices; None if unknown.

        Args:
            dtype: the type of the numbers, as for `trial_lib.device.data_sheets.peak_flops`.
        """


# A CPU. Memory is the process's own and has a slot's budget, and work is done when a call returns.


# Bytes, with room for the block's own header. A larger block moves no threshold.
_LARGEST_MAPPED = (32 << 20) - (64 << 10)


class CpuDevice:
    """See `Device`."""

    kind = "cpu"
    is_apart = False

    def used_bytes(self) -> int:
        """Returns the process's own resident bytes."""
        return own_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Returns the peak of the resident bytes. DeepSpeed's own figure is the largest at the moments it looked."""
        return own_bytes("VmHWM")

    def available_bytes(self) -> int | None:
        """Returns the rest of the slot's budget; None without one."""
        budget, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return None if budget == resource.RLIM_INFINITY else budget - _status_bytes("VmData")

    def left_bytes(self) -> dict[str, int]:
        """Returns the rest of the slot's budget, and the budget."""
        budget, _ = resource.getrlimit(resource.RLIMIT_DATA)
        free = self.available_bytes()
        return {} if free is None else {"free": free, "total": budget}

    def total_bytes(self) -> int:
        """Returns 0, because a slot has a budget instead."""
        return 0

    def allocator_figures(self) -> dict[str, int]:
        """Returns nothing, because the C library has no such figures."""
        return {}

    def forget_peak(self) -> None:
        """Does nothing. Pages that the preparation has touched stay with the process, and a step uses them again."""

    def start_over(self) -> None:
        """Returns free pages, which the C library keeps and which would count as in use.

        Some kernels, such as gVisor's, count peaks only from the start of the process. Then an earlier peak stays,
        which is at most that of a larger micro-batch.
        """
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        # The kernel resets VmHWM this way (proc_pid_clear_refs(5)).
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def limit(self, budget: int) -> int:
        """Limits the process's own allocations by RLIMIT_DATA. Memory that it has taken already is not free.

        The stacks of its threads count, and mapped files do not (RLIMIT_AS would count libraries). Call it after the
        imports, which it would break. Just-in-time builds run without the limit, because a compiler's memory is not the
        model's.
        """
        _spare_builds()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (budget, hard))
        return budget - _status_bytes("VmData")

    def unlimit(self) -> None:
        """Removes the limit."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def keep_what_is_freed(self) -> None:
        """Makes the C library keep freed memory.

        In the first steps glibc returns the top of the heap after each step, and every step faults it in again. This
        costs 5 % of a small model's processor time for a thousand pages (benchmarks/promise). The amount follows the
        largest mapped block that was freed, up to 32 MiB: mallopt(3), M_MMAP_THRESHOLD. With another C library this
        does nothing. It does nothing either in a slot without room for the block, which takes addresses but no memory.
        """
        with contextlib.suppress(MemoryError):
            bytes(_LARGEST_MAPPED)

    def finish(self) -> None:
        """Returns at once."""

    def instant(self) -> float:
        """Returns the clock's time."""
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        """Returns the difference."""
        return end - start

    def is_recording(self) -> bool:
        """Returns False."""
        return False

    def is_busy(self) -> bool:
        """Returns False."""
        return False

    def multiplies_in_tf32(self, module: Any) -> bool:
        """Returns False, because a CPU has no such format."""
        return False

    def peak_flops(self, dtype: str) -> float | None:
        """Returns nothing. No data sheet has the peak of some cores of a processor."""


def own_bytes(resident: str) -> int:
    """Returns the resident bytes that count towards a slot's budget, without pages of mapped files such as libraries.

    Most mapped pages come with the first step, some tens of megabytes, and stay.

    Args:
        resident: their name in proc_pid_status(5).
    """
    return _status_bytes(resident) - _status_bytes("RssFile")


def _status_bytes(field: str) -> int:
    # A size of this process from the kernel; 0 if it has none (proc_pid_status(5)).
    shown = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(errors="replace").splitlines())
    return int(shown.get(field, "0").split()[0]) * 1024


def _spare_builds() -> None:
    # Runs just-in-time builds without the limit from now on.
    from torch.utils import cpp_extension

    build = cpp_extension._run_ninja_build
    if build.__module__ == __name__:
        return

    def build_without_limit(*args: Any, **kwargs: Any) -> Any:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        try:
            return build(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    cpp_extension._run_ninja_build = build_without_limit


def allows_products() -> bool:
    """Returns whether products of matrices may use it."""
    backend = torch.backends.cuda.matmul
    return _allows(lambda: backend.allow_tf32) or _says_tf32(backend)


def allows_convolutions() -> bool:
    """Returns whether convolutions may, as they may by default."""
    backend = torch.backends.cudnn
    return _allows(lambda: backend.allow_tf32) or _says_tf32(getattr(backend, "conv", None))


def _allows(flag: Callable[[], bool]) -> bool:
    # torch raises if the program has set it by its newer name, so that is asked as well.
    with contextlib.suppress(RuntimeError):
        return bool(flag())
    return False


def _says_tf32(backend: Any) -> bool:
    return getattr(backend, "fp32_precision", "") == "tf32"


# A GPU that PyTorch calls `cuda`, including AMD's. Its memory is that of the caching allocator.


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
        if allows_products():
            return True
        return any(isinstance(each, _BY_CUDNN) for each in module.modules()) and allows_convolutions()

    def peak_flops(self, dtype: str) -> float | None:
        """Returns the data sheet's peak; for a slice of a device its share."""
        name = torch.cuda.get_device_name(self._index)
        multiprocessors = torch.cuda.get_device_properties(self._index).multi_processor_count
        return peak_flops(name, dtype, share_of(name, multiprocessors))


# The device of a rank.


class UnknownDeviceError(Exception):
    """A rank trains on a kind of device that ZeroTune cannot measure."""


def device_of(device: torch.device) -> Device:
    """Returns the implementation for a device.

    Args:
        device: of an engine.

    Raises:
        UnknownDeviceError: it is neither a CPU nor one that PyTorch calls `cuda`, as it does NVIDIA's and AMD's.
    """
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(torch.cuda.current_device() if device.index is None else device.index)
    raise UnknownDeviceError(
        f"The program trains on `{device.type}`, which ZeroTune does not measure: it knows the GPUs that PyTorch calls "
        "`cuda` (NVIDIA's and AMD's) and CPUs. Set DS_ACCELERATOR=cpu to tune on this host's CPU."
    )


def device_in_use() -> Device:
    """Returns the GPU that this process has opened, or the CPU. It opens nothing."""
    return CudaDevice(torch.cuda.current_device()) if torch.cuda.is_initialized() else CpuDevice()


def device_to_come() -> Device:
    """Returns the device that a rank without an engine will have, as DeepSpeed chooses it.

    Raises:
        UnknownDeviceError: see `device_of`.
    """
    from deepspeed.accelerator import get_accelerator

    kind = get_accelerator().device_name()
    if kind != "cuda":
        return device_of(torch.device(kind))
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    return CudaDevice(local_rank if local_rank < count else torch.cuda.current_device())


# Whether a rank trains on the kind of device of its slot. The driver has asked NVML, and DeepSpeed asks torch.


_ON_CORES = "set CUDA_VISIBLE_DEVICES= (to nothing) to tune on this host's cores."


class OtherDeviceError(InputError):
    """The rank trains on another kind of device than its slot."""


@dataclass
class _Expected:
    kind: str | None = None


_expected = _Expected()


def expect(kind: str | None) -> None:
    """Sets the kind of slots that `require` compares with: `cuda`, `cpu`, or None for any."""
    _expected.kind = kind


def found() -> str:
    """Returns PyTorch's name for the kind of device that DeepSpeed trains on here. AMD's GPUs are `cuda` too."""
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def require() -> None:
    """Compares the device with the slot. Call it when DeepSpeed is imported, before an engine is built.

    Raises:
        OtherDeviceError: they are of two kinds.
    """
    kind = found() if _expected.kind is not None else None
    if kind == _expected.kind:
        return
    assert kind is not None
    raise _on_cores_of(kind) if _expected.kind == "cpu" else _without_gpu(kind)


def _without_gpu(kind: str) -> OtherDeviceError:
    import torch

    ranks = "the CPU" if kind == "cpu" else f"`{kind}`"
    what = f"the program's DeepSpeed trains on {ranks}, but this host's slots are GPUs"
    choice = os.environ.get("DS_ACCELERATOR")
    if choice:
        return OtherDeviceError(
            f"{what}: DS_ACCELERATOR={choice} chooses that.",
            where="the environment",
            remedy=f"Unset it, or leave it and {_ON_CORES}",
        )
    built_for = _gpus_of_torch()
    if built_for is None:
        return OtherDeviceError(
            f"{what}: torch {torch.__version__} is built without CUDA.",
            where=sys.executable,
            remedy=f"Install a torch for your GPUs there (https://pytorch.org), or {_ON_CORES}",
        )
    return OtherDeviceError(
        f"{what}: torch {torch.__version__}, built for {built_for}, finds none that it can use.",
        where=sys.executable,
        remedy='Check with `python -c "import torch; torch.cuda.init()"` there. Usually the driver is too old. '
        f"Or {_ON_CORES}",
    )


def _gpus_of_torch() -> str | None:
    # The GPUs that torch is built for, such as `CUDA 13.0`; None for a CPU alone.
    import torch

    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip else None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _on_cores_of(kind: str) -> OtherDeviceError:
    what = f"the program's DeepSpeed trains on `{kind}`, but this host's slots are its cores"
    if kind != "cuda":
        return OtherDeviceError(
            f"{what}. ZeroTune does not tune on that kind.",
            where="the devices",
            remedy="Set DS_ACCELERATOR=cpu to tune on this host's cores.",
        )
    if (_gpus_of_torch() or "").startswith("ROCm"):
        return OtherDeviceError(
            f"{what}: the kernel shows ZeroTune no AMD GPU.",
            where="/sys/class/kfd",
            remedy=f"If this is a container, start it with --device=/dev/kfd --device=/dev/dri. Or {_ON_CORES}",
        )
    return OtherDeviceError(
        f"{what}: NVML shows ZeroTune no NVIDIA GPU.",
        where="the NVIDIA driver",
        remedy="If this is a container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility, so that it has NVML. "
        f"Check with `nvidia-smi`. Or {_ON_CORES}",
    )
