"""A CPU: memory is the process's own, a slot's budget bounds it, and work is done when a call returns."""

import contextlib
import ctypes
import gc
import resource
import time
from pathlib import Path
from typing import Any

# Bytes, the block's own header left room for: a larger block moves no threshold.
_LARGEST_MAPPED = (32 << 20) - (64 << 10)


class CpuDevice:
    """See `Device`."""

    kind = "cpu"
    is_apart = False

    def used_bytes(self) -> int:
        """Returns the process's own resident bytes."""
        return own_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Returns the most of them. DeepSpeed's own figure is the largest at the moments it looked."""
        return own_bytes("VmHWM")

    def available_bytes(self) -> int | None:
        """Returns what is left of the slot's budget; None without one."""
        budget, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return None if budget == resource.RLIM_INFINITY else budget - _status_bytes("VmData")

    def left_bytes(self) -> dict[str, int]:
        """Returns what is left of the slot's budget, and the budget."""
        budget, _ = resource.getrlimit(resource.RLIMIT_DATA)
        free = self.available_bytes()
        return {} if free is None else {"free": free, "total": budget}

    def total_bytes(self) -> int:
        """Returns 0: a slot has a budget instead."""
        return 0

    def allocator_figures(self) -> dict[str, int]:
        """Returns nothing: the C library tells no more."""
        return {}

    def forget_peak(self) -> None:
        """Does nothing: pages that the preparation has touched stay with the process, and a step uses them again."""

    def start_over(self) -> None:
        """Gives free pages back, which the C library keeps and which would count as in use.

        Some kernels (gVisor's, say) count peaks from the start of the process only. Then an earlier peak stands, which
        is no more than that of a larger micro-batch.
        """
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        # The kernel's way of resetting VmHWM (proc_pid_clear_refs(5)).
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def limit(self, budget: int) -> int:
        """Bounds what the process itself allocates, by RLIMIT_DATA; what it has taken for itself is not free.

        The stacks of its threads count, files it maps do not (RLIMIT_AS would count libraries). To be called after the
        imports, which it would break. Just-in-time builds run outside: a compiler's memory is not the model's.
        """
        _spare_builds()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (budget, hard))
        return budget - _status_bytes("VmData")

    def unlimit(self) -> None:
        """Lifts what `limit` has set."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def keep_what_is_freed(self) -> None:
        """Has the C library keep freed memory.

        In the first steps glibc gives the top of the heap back after each, and every step faults it in again: 5 % of a
        small model's processor time for a thousand pages (benchmarks/promise). How much is given back follows the
        largest mapped block that was freed, up to 32 MiB: mallopt(3), M_MMAP_THRESHOLD. Elsewhere this does nothing,
        and so it does in a slot that has no room for the block, which takes addresses but no memory.
        """
        with contextlib.suppress(MemoryError):
            bytes(_LARGEST_MAPPED)

    def finish(self) -> None:
        """Returns at once."""

    def instant(self) -> float:
        """Returns the clock."""
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
        """Returns False: a CPU has no such format."""
        return False

    def peak_flops(self, dtype: str) -> float | None:
        """Returns nothing: what a few cores of a processor can do at best stands on no sheet."""


def own_bytes(resident: str) -> int:
    """Returns the resident bytes that a slot's budget counts: pages of mapped files, such as libraries, are not.

    Most of them come with the first step, some tens of megabytes, and stay.

    Args:
        resident: which ones, as proc_pid_status(5) calls them.
    """
    return _status_bytes(resident) - _status_bytes("RssFile")


def _status_bytes(field: str) -> int:
    """Returns a size that the kernel shows of this process; 0 where it does not (proc_pid_status(5))."""
    shown = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(errors="replace").splitlines())
    return int(shown.get(field, "0").split()[0]) * 1024


def _spare_builds() -> None:
    """Has just-in-time builds run outside the budget, from now on."""
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
