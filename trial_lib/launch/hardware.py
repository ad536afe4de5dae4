"""What this host has: its accelerators or cores, and their memory. Asked without importing torch."""

import contextlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import pynvml

_HOST_RESERVE = 0.1
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Host:
    """The devices of this host that trials may use.

    Attributes:
        device: `cuda` or `cpu`.
        slots: what a trial is given to address each: the index or UUID of a GPU as CUDA_VISIBLE_DEVICES spells it, the
            number of a core.
        memory_per_slot: bytes of one device; on a CPU the host's memory over the slots, less a reserve of a tenth.
    """

    device: str
    slots: list[str]
    memory_per_slot: int


def this_host() -> Host:
    """Returns what this process may use: CUDA_VISIBLE_DEVICES and the processor affinity are honoured."""
    gpus = _gpus()
    if gpus is not None:
        names, memory = gpus
        return Host("cuda", names, memory)
    cores = sorted(os.sched_getaffinity(0))
    memory = int(_host_memory() * (1 - _HOST_RESERVE)) // len(cores)
    return Host("cpu", [str(core) for core in cores], memory)


def _host_memory() -> int:
    """Returns the bytes that this process may use: the machine's, or its container's where that has fewer."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        return min(total, int(_CONTAINER_LIMIT.read_text()))
    return total


def _visible(variable: str) -> list[str]:
    """Returns the devices that CUDA_VISIBLE_DEVICES names: as CUDA reads it, up to the first that there is none of."""
    names = [name.strip() for name in variable.split(",")]
    return list(itertools.takewhile(lambda name: name not in ("", "-1", "none", "void", "NoDevFiles"), names))


def _gpus() -> tuple[list[str], int] | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(index) for index in range(count)] if visible is None else _visible(visible)
        if not names:
            return None
        memory = min(
            int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).total)
            for index in range(count)
        )
        return names, memory
    finally:
        pynvml.nvmlShutdown()
