"""A CPU. Memory is the process's own and has a slot's budget, and work is done when a call returns."""

import contextlib
import ctypes
import gc
import resource
import time
from pathlib import Path
from typing import Any

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
    """Returns a size of this process from the kernel; 0 if it has none (proc_pid_status(5))."""
    shown = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(errors="replace").splitlines())
    return int(shown.get(field, "0").split()[0]) * 1024


def _spare_builds() -> None:
    """Runs just-in-time builds without the limit from now on."""
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
