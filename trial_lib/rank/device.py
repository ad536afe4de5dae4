"""A rank's own devices, as PyTorch sees them in the user's environment."""

import contextlib
import ctypes
import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from zerotune.trial_lib.device.data_sheets import peak_flops, share_of
from zerotune.trial_lib.messages.errors import InputError


class Device(Protocol):
    kind: str  # PyTorch's name: `cpu`, `cuda`
    # Whether it works beside the processor that runs the program. Then a call returns before its work is done, and a
    # thread that waits for it may spin.
    is_apart: bool

    def used_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...  # since `start_over` or `forget_peak`
    def available_bytes(self) -> int | None: ...  # that this process may still take; None if nothing limits it
    # `free` and `total`, and `reserved` with `allocated` of an allocator; empty if nothing limits them
    def left_bytes(self) -> dict[str, int]: ...
    def total_bytes(self) -> int: ...  # the most that the model may have; 0 if only `limit` decides
    def allocator_figures(self) -> dict[str, int]: ...  # bytes reserved, and retries
    def forget_peak(self) -> None: ...  # starts the peak of the steps here, if that of their preparation would hide it
    def start_over(self) -> None: ...  # frees memory, and starts all figures here
    # Fails allocations beyond `budget` bytes, after the imports; returns what is still free of it
    def limit(self, budget: int) -> int: ...
    def unlimit(self) -> None: ...
    # Memory that a step frees stays with the process, as some tens of steps into a training
    def keep_what_is_freed(self) -> None: ...
    def finish(self) -> None: ...  # waits until the device has done its work
    def instant(self) -> Any: ...  # a moment in the device's own time, without waiting for it
    def seconds_between(self, start: Any, end: Any) -> float: ...  # after `finish`
    def is_recording(self) -> bool: ...  # work is recorded for later (CUDA graph), so that nothing can be timed
    def is_busy(self) -> bool: ...
    # Whether 32-bit matrices are multiplied with float16's mantissa
    def multiplies_in_tf32(self, module: Any) -> bool: ...
    # FLOP/s of products of matrices, by `data_sheets`' names of types; None if unknown
    def peak_flops(self, dtype: str) -> float | None: ...


# Bytes, with room for the block's own header. A larger block moves no threshold.
_LARGEST_MAPPED = (32 << 20) - (64 << 10)


class CpuDevice:
    """A CPU's cores. Its memory is the process's own resident bytes, within the slot's budget if there is one."""

    kind = "cpu"
    is_apart = False

    def used_bytes(self) -> int:
        return own_bytes("VmRSS")

    def peak_bytes(self) -> int:
        # DeepSpeed's own figure is the largest at the moments it looked.
        return own_bytes("VmHWM")

    def available_bytes(self) -> int | None:
        budget, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return None if budget == resource.RLIM_INFINITY else budget - status_bytes("VmData")

    def left_bytes(self) -> dict[str, int]:
        budget, _ = resource.getrlimit(resource.RLIMIT_DATA)
        free = self.available_bytes()
        return {} if free is None else {"free": free, "total": budget}

    def total_bytes(self) -> int:
        return 0

    def allocator_figures(self) -> dict[str, int]:
        return {}

    def forget_peak(self) -> None:
        pass  # Pages that the preparation has touched stay with the process, and a step uses them again.

    def start_over(self) -> None:
        # Returns free pages, which the C library keeps and which would count as in use. Some kernels, such as gVisor's,
        # count peaks only from the start of the process; an earlier peak then stays, at most that of a larger micro-
        # batch.
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        # The kernel resets VmHWM this way (proc_pid_clear_refs(5)).
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def limit(self, budget: int) -> int:
        # RLIMIT_DATA counts the stacks of threads, and no mapped files (RLIMIT_AS would count libraries). Imports would
        # break, so it comes after them. Just-in-time builds run without it: a compiler's memory is not the model's.
        _spare_builds()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (budget, hard))
        return budget - status_bytes("VmData")

    def unlimit(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def keep_what_is_freed(self) -> None:
        # In the first steps glibc returns the top of the heap after each step, and every step faults it in again: 5 %
        # of a small model's processor time for a thousand pages (benchmarks/promise). The amount follows the largest
        # mapped block that was freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). Without glibc, or room for the
        # block, this does nothing.
        with contextlib.suppress(MemoryError):
            bytes(_LARGEST_MAPPED)

    def finish(self) -> None: ...

    def instant(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def is_recording(self) -> bool:
        return False

    def is_busy(self) -> bool:
        return False

    def multiplies_in_tf32(self, module: Any) -> bool:
        return False

    def peak_flops(self, dtype: str) -> float | None: ...


def own_bytes(resident: str) -> int:
    """The resident bytes that count towards a slot's budget: without mapped files such as libraries.

    Most mapped pages, some tens of megabytes, come with the first step and stay. `resident` is of proc_pid_status(5).
    """
    return status_bytes(resident) - status_bytes("RssFile")


def status_bytes(field: str) -> int:
    """A size of this process from the kernel; 0 if it has none (proc_pid_status(5))."""
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
    """Whether products of matrices may use TF32."""
    backend = torch.backends.cuda.matmul
    return _allows(lambda: backend.allow_tf32) or _says_tf32(backend)


def allows_convolutions() -> bool:
    """Whether convolutions may use TF32, as they may by default."""
    backend = torch.backends.cudnn
    return _allows(lambda: backend.allow_tf32) or _says_tf32(getattr(backend, "conv", None))


def _allows(flag: Callable[[], bool]) -> bool:
    # torch raises if the program has set it by its newer name, so that is asked as well.
    with contextlib.suppress(RuntimeError):
        return bool(flag())
    return False


def _says_tf32(backend: Any) -> bool:
    return getattr(backend, "fp32_precision", "") == "tf32"


# NVIDIA's Ampere generation.
_TF32_SINCE = (8, 0)
_BY_CUDNN = (torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)


class CudaDevice:
    """A GPU that PyTorch calls `cuda`, including AMD's. Its memory is that of the caching allocator."""

    kind = "cuda"
    is_apart = True

    def __init__(self, index: int) -> None:
        self._index = index
        # The limit. torch reports it only from 2.9 on.
        self._budget: int | None = None

    def used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._index)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._index)

    def available_bytes(self) -> int | None:
        # What the allocator holds unused is available as well, within its limit.
        free, _ = torch.cuda.mem_get_info(self._index)
        used = self.used_bytes()
        return min(int(free + torch.cuda.memory_reserved(self._index)), self.total_bytes()) - used

    def left_bytes(self) -> dict[str, int]:
        free, total = torch.cuda.mem_get_info(self._index)
        held = {"reserved": torch.cuda.memory_reserved(self._index), "allocated": self.used_bytes()}
        return {"free": int(free), "total": int(total), **held}

    def total_bytes(self) -> int:
        total = self._memory()
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)(self._index)
        return min(int(total * fraction), total if self._budget is None else self._budget)

    def _memory(self) -> int:
        return int(torch.cuda.get_device_properties(self._index).total_memory)

    def allocator_figures(self) -> dict[str, int]:
        return {
            "peak_reserved": torch.cuda.max_memory_reserved(self._index),
            "allocator_retries": int(torch.cuda.memory_stats(self._index).get("num_alloc_retries", 0)),
        }

    def forget_peak(self) -> None:
        # `deepspeed.initialize` briefly takes memory (copies, flattening) that no step needs.
        torch.cuda.reset_peak_memory_stats(self._index)

    def start_over(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        getattr(torch._C, "_accelerator_emptyHostCache", getattr(torch._C, "_host_emptyCache", lambda: None))()
        torch.cuda.reset_peak_memory_stats(self._index)
        # Retries count from the start of the process, so they are reset with all other counters.
        torch.cuda.reset_accumulated_memory_stats(self._index)

    def limit(self, budget: int) -> int:
        # A program with a limit of its own overrides it.
        self._budget = budget
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / self._memory()), self._index)
        return budget - self.used_bytes()

    def unlimit(self) -> None:
        if self._budget is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self._index)
            self._budget = None

    def keep_what_is_freed(self) -> None: ...

    def finish(self) -> None:
        torch.cuda.synchronize(self._index)

    def instant(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._index))
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def is_recording(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def is_busy(self) -> bool:
        # By its number: a thread's own device is the first one, where asking would take memory.
        return not torch.cuda.current_stream(self._index).query()

    def multiplies_in_tf32(self, module: Any) -> bool:
        if torch.cuda.get_device_capability(self._index) < _TF32_SINCE:
            return False
        if allows_products():
            return True
        return any(isinstance(each, _BY_CUDNN) for each in module.modules()) and allows_convolutions()

    def peak_flops(self, dtype: str) -> float | None:
        name = torch.cuda.get_device_name(self._index)
        multiprocessors = torch.cuda.get_device_properties(self._index).multi_processor_count
        return peak_flops(name, dtype, share_of(name, multiprocessors))


class UnknownDeviceError(Exception):
    """A rank trains on a kind of device that ZeroTune cannot measure."""


def device_of(device: torch.device) -> Device:
    """The `Device` of an engine's device. UnknownDeviceError if that is neither a CPU nor what PyTorch calls `cuda`."""
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(torch.cuda.current_device() if device.index is None else device.index)
    raise UnknownDeviceError(
        f"The program trains on `{device.type}`, which ZeroTune does not measure: it knows the GPUs that PyTorch calls "
        "`cuda` (NVIDIA's and AMD's) and CPUs. Set DS_ACCELERATOR=cpu to tune on this host's CPU."
    )


def device_in_use() -> Device:
    """The GPU that this process has opened, or the CPU. It opens nothing."""
    return CudaDevice(torch.cuda.current_device()) if torch.cuda.is_initialized() else CpuDevice()


def device_to_come() -> Device:
    """The device that a rank without an engine will have, as DeepSpeed chooses it."""
    from deepspeed.accelerator import get_accelerator

    kind = get_accelerator().device_name()
    if kind != "cuda":
        return device_of(torch.device(kind))
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    return CudaDevice(local_rank if local_rank < count else torch.cuda.current_device())


# Whether a rank trains on the kind of device of its slot: the driver has asked NVML, and DeepSpeed asks torch

_ON_CORES = "set CUDA_VISIBLE_DEVICES= (to nothing) to tune on this host's cores."


class OtherDeviceError(InputError):
    """The rank trains on another kind of device than its slot."""


_expected_kind: str | None = None


def expect(kind: str | None) -> None:
    """Sets the kind of slots that `require` compares with: `cuda`, `cpu`, or None for any."""
    global _expected_kind
    _expected_kind = kind


def found() -> str:
    """PyTorch's name for the kind of device that DeepSpeed trains on here. AMD's GPUs are `cuda` too."""
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def require() -> None:
    """Compares the device with the slot, when DeepSpeed is imported and before an engine is built."""
    if _expected_kind is None or (kind := found()) == _expected_kind:
        return
    raise _on_cores_of(kind) if _expected_kind == "cpu" else _without_gpu(kind)


def _without_gpu(kind: str) -> OtherDeviceError:
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
