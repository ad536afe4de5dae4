"""CUDA's own order of this host's GPUs: by speed, unless CUDA_DEVICE_ORDER says otherwise.

As a script it asks libcuda. A process that has to fork later must not do that.
"""

import ctypes
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
_ANSWER_S = 60.0


def cuda_order(variables: Mapping[str, str]) -> list[str]:
    """Returns the UUIDs of the GPUs in CUDA's order in an environment; empty if CUDA does not answer."""
    environment = {name: value for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        asked = subprocess.run(
            [sys.executable, "-I", str(Path(__file__))],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return asked.stdout.split()


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


def _ask() -> list[str]:
    cuda = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        raise OSError("CUDA does not answer")
    found = []
    for number in range(count.value):
        device, name = ctypes.c_int(), _Uuid()
        if cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceGetUuid(ctypes.byref(name), device):
            raise OSError(f"CUDA does not answer for device {number}")
        found.append(f"GPU-{uuid.UUID(bytes=bytes(name.bytes))}")
    return found


if __name__ == "__main__":
    print(*_ask(), sep="\n")
