"""The real memory of this process, which a foreseen run takes beside the pretended one: libraries, data sets."""

import ctypes
import os
from pathlib import Path


class _HeapFigures(ctypes.Structure):
    """The figures of mallinfo2(3), of which two are used: bytes in mapped blocks, and in all others."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "k")
    ]


def heap_bytes() -> int:
    """Returns the bytes that the program holds of the C library's heap; 0 if that library does not show it."""
    figures = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if figures is None:
        return 0
    figures.restype = _HeapFigures
    found = figures()
    return int(found.hblkhd + found.uordblks)


def status_bytes(field: str) -> int:
    """Returns a size of this process from the kernel; 0 if it has none (proc_pid_status(5))."""
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
