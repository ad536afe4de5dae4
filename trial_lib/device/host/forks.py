"""Whether a process may still be forked, as far as the devices' drivers are concerned. Runs in the user's environment.

A driver that is initialised does not work in a child of the process. It has its own files open.
"""

import contextlib
import ctypes
import os
from pathlib import Path

# Each is opened by its driver's initialisation, by whichever library.
_FILES = {"/dev/nvidia-uvm": "CUDA", "/dev/kfd": "ROCm"}
_CUDA, _SUCCESS = "libcuda.so.1", 0


def initialised_driver() -> str | None:
    """Returns the name of the driver that this process has initialised; None for none."""
    links = _open_files()
    opened = next((name for file, name in _FILES.items() if any(link.startswith(file) for link in links)), None)
    return "CUDA" if opened is None and _is_cuda_initialised() else opened


def _is_cuda_initialised() -> bool:
    """Returns what libcuda itself says, where this process has loaded it; it is not loaded for the question.

    In Windows' subsystem for Linux there is no file to tell by: NVML, which is harmless, opens /dev/dxg as CUDA does.
    """
    try:
        cuda = ctypes.CDLL(_CUDA, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        # Before cuInit every function fails.
        return bool(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _SUCCESS)
    except (OSError, AttributeError):
        return False


def _open_files() -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(descriptor.readlink()))
    return links
