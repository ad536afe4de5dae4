"""Whether a process can still be forked, as far as the drivers of devices are concerned.

Runs in the user's environment.

An initialised driver does not work in a child of the process. It has opened files of its own.
"""

import contextlib
import ctypes
import os
from pathlib import Path

# The initialisation of each driver opens its file, from whichever library.
_FILES = {"/dev/nvidia-uvm": "CUDA", "/dev/kfd": "ROCm"}
_CUDA, _SUCCESS = "libcuda.so.1", 0


def initialised_driver() -> str | None:
    """Returns the name of the driver that this process has initialised; None for none."""
    links = _open_files()
    opened = next((name for file, name in _FILES.items() if any(link.startswith(file) for link in links)), None)
    return "CUDA" if opened is None and _is_cuda_initialised() else opened


def _is_cuda_initialised() -> bool:
    """Returns libcuda's own answer if this process has loaded it. The question does not load it.

    In Windows' subsystem for Linux no file shows it, because NVML opens /dev/dxg as well, and NVML is harmless.
    """
    try:
        cuda = ctypes.CDLL(_CUDA, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        # Every function fails before cuInit.
        return bool(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _SUCCESS)
    except (OSError, AttributeError):
        return False


def _open_files() -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(descriptor.readlink()))
    return links
