"""The memory of the host itself."""

import contextlib
from pathlib import Path

import psutil

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory() -> int:
    """Returns the bytes that this process may use: the machine's, or its container's if it has fewer."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        return min(total, int(_CONTAINER_LIMIT.read_text()))
    return total
