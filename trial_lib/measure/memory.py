"""Memory of a rank: how much it used, and the budget of a CPU slot."""

import contextlib
import ctypes
import gc
import resource
from pathlib import Path
from typing import Any

import torch

# Bytes, the block's own header left room for: a larger block moves no threshold.
_LARGEST_MAPPED = (32 << 20) - (64 << 10)


def _status_bytes(field: str) -> int:
    """Returns a size that the kernel shows of this process; 0 where it does not (proc_pid_status(5))."""
    shown = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(errors="replace").splitlines())
    return int(shown.get(field, "0").split()[0]) * 1024


def _own_bytes(resident: str) -> int:
    """Returns the resident bytes that a slot's budget counts: pages of mapped files, such as libraries, are not.

    Most of them come with the first step, some tens of megabytes, and stay.
    """
    return _status_bytes(resident) - _status_bytes("RssFile")


def limit(budget: int) -> int:
    """Makes every allocation beyond a CPU slot's budget fail, as one on a full device does.

    RLIMIT_DATA bounds what the process itself allocates, the stacks of its threads among it; files it maps do not count
    (RLIMIT_AS would count libraries). To be set after the imports, which it would break.

    Args:
        budget: bytes that this rank may use.

    Returns:
        The bytes of it that are still free for the model: what the process has taken for itself is not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (budget, hard))
    return budget - _status_bytes("VmData")


def keep_what_is_freed() -> None:
    """Has the C library keep freed memory, as it comes to by itself some tens of steps into a training.

    In the first steps glibc gives the top of the heap back after each, and every step faults it in again: 5 % of a
    small model's processor time for a thousand pages (benchmarks/promise). How much is given back follows the largest
    mapped block that was freed, up to 32 MiB: mallopt(3), M_MMAP_THRESHOLD. Elsewhere this does nothing, and so it
    does in a slot that has no room for the block, which takes addresses but no memory.
    """
    with contextlib.suppress(MemoryError):
        bytes(_LARGEST_MAPPED)


def unlimit() -> None:
    """Lifts what `limit` has set."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def spare_builds() -> None:
    """Has just-in-time builds run outside the slot's budget: a compiler's memory is not the model's."""
    from torch.utils import cpp_extension

    build = cpp_extension._run_ninja_build

    def build_without_limit(*args: Any, **kwargs: Any) -> Any:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        try:
            return build(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    cpp_extension._run_ninja_build = build_without_limit


def start_over() -> None:
    """Gives free memory back, and has the peak count from here on.

    The C library keeps pages that are free, which on a CPU would count as in use.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    # The kernel's way of resetting VmHWM (proc_pid_clear_refs(5)).
    Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # Retries are counted from the start of the process: reset with all the other counters.
        torch.cuda.reset_accumulated_memory_stats()


def used_bytes() -> int:
    """Returns the bytes in use now: allocated on CUDA, the process's own on a CPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    return _own_bytes("VmRSS")


def available_bytes() -> int | None:
    """Returns the bytes that this process may still take: of its device on CUDA, of its slot's budget on a CPU.

    None where a CPU slot has no budget.
    """
    if torch.cuda.is_initialized():
        free, _ = torch.cuda.mem_get_info()
        # What the caching allocator holds and nobody uses is as good as free.
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    budget, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if budget == resource.RLIM_INFINITY else budget - _status_bytes("VmData")


def peak_bytes() -> int:
    """Returns the most bytes that were in use at any moment: allocated on CUDA, the process's own on a CPU.

    DeepSpeed's own figure for a CPU is the largest at the moments it looked.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return _own_bytes("VmHWM")


def allocator_figures() -> dict[str, int]:
    """Returns what CUDA's caching allocator knows beyond the peak: bytes reserved, and retries. Empty on a CPU."""
    if not torch.cuda.is_initialized():
        return {}
    return {
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "allocator_retries": int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
    }


def left_bytes() -> dict[str, int]:
    """Returns what this rank may still take, of how much: `free` and `total`; empty where a CPU slot has no budget.

    On CUDA also what the caching allocator has `reserved`, and what of that is `allocated`. `free` is what nobody has,
    so what the allocator holds and does not use is no part of it.
    """
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        held = {"reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
        return {"free": int(free), "total": int(total), **held}
    budget, _ = resource.getrlimit(resource.RLIMIT_DATA)
    free_here = available_bytes()
    return {} if free_here is None else {"free": free_here, "total": budget}


def device_bytes() -> int:
    """Returns the memory of this rank's CUDA device; 0 on a CPU, where a slot has a budget instead."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
