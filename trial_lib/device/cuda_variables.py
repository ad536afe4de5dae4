"""Variables that CUDA and the builds for it read: the order of a host's GPUs, and the architectures to build for.

As a script it asks libcuda for the order. A process that has to fork later must not do that.
"""

import ctypes
import re
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

# CUDA's own order is by speed, unless the variable says otherwise.
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


# torch reads more spellings of architectures than DeepSpeed. Some images set the variable to `9.0a`, which torch takes.
# DeepSpeed 0.19.8 raises a `ValueError` for anything but numbers, in `compute_capability_args` of
# `deepspeed/ops/op_builder/builder.py`. Seen in an image for the H200.
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
_NUMBER = re.compile(r"\d+\.\d+(\+PTX)?")


def unread_architectures(environment: Mapping[str, str]) -> str:
    """What DeepSpeed cannot read in the variable, and the remedy; empty if it can read it.

    >>> unread_architectures({"TORCH_CUDA_ARCH_LIST": "8.0 9.0+PTX"})
    ''
    """
    value = environment.get(ARCHITECTURES, "")
    unread = [word for word in value.replace(";", " ").split() if not _NUMBER.fullmatch(word)]
    if not unread:
        return ""
    numbers = "numbers such as 9.0 or 9.0+PTX"
    return (
        f"{ARCHITECTURES} has {', '.join(unread)}. DeepSpeed builds its ops by it, and reads only {numbers}. "
        "Set it to the number of your GPU, or unset it."
    )


if __name__ == "__main__":
    print(*_ask(), sep="\n")
