"""What this host has: its accelerators or cores, and their memory. Asked without importing torch."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pynvml

from trial_lib.experiment.errors import InputError

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
        devices: the UUID of each slot's GPU: CUDA_VISIBLE_DEVICES may spell one GPU in many ways.
    """

    device: str
    slots: list[str]
    memory_per_slot: int
    devices: Mapping[str, str] = field(default_factory=dict)

    def device_of(self, slot: str) -> str:
        """Returns the name of a slot's device, which is the same for everybody on this host."""
        return self.devices.get(slot, slot)


def this_host(visible: str | None = None) -> Host:
    """Returns what this process may use: CUDA_VISIBLE_DEVICES and the processor affinity are honoured.

    Args:
        visible: a value of CUDA_VISIBLE_DEVICES in the place of this process's; None for that.
    """
    gpus = _gpus(os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible)
    if gpus is not None:
        return gpus
    cores = sorted(os.sched_getaffinity(0))
    memory = int(_host_memory() * (1 - _HOST_RESERVE)) // len(cores)
    return Host("cpu", [str(core) for core in cores], memory)


def _host_memory() -> int:
    """Returns the bytes that this process may use: the machine's, or its container's where that has fewer."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        return min(total, int(_CONTAINER_LIMIT.read_text()))
    return total


def _gpus(variable: str | None) -> Host | None:
    """Returns the GPUs that a value of CUDA_VISIBLE_DEVICES names, all for None; None where this host has none.

    Raises:
        InputError: there is a driver, and it does not answer: to tune on the processor instead is what nobody wants.
    """
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise _broken_driver(error) from None
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        gpus = {pynvml.nvmlDeviceGetUUID(handle): _gpu_memory(handle) for handle in handles}
    except pynvml.NVMLError as error:
        raise _broken_driver(error) from None
    finally:
        pynvml.nvmlShutdown()
    devices = visible_devices(",".join(map(str, range(len(gpus)))) if variable is None else variable, list(gpus))
    if not devices:
        return None
    memory = min(gpus.get(device, min(gpus.values())) for device in devices.values())
    return Host("cuda", list(devices), memory, devices)


def _gpu_memory(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:
        # A GPU that has the host's memory has none of its own to tell of.
        return _host_memory()


def _broken_driver(error: Exception) -> InputError:
    return InputError(
        f"it cannot say which GPUs there are ({error}).",
        where="the NVIDIA driver",
        remedy="See what `nvidia-smi` says; mostly the driver was updated, or lost a GPU, and the host has to restart.",
    )


def visible_devices(variable: str, uuids: Sequence[str]) -> dict[str, str]:
    """Returns the devices that CUDA_VISIBLE_DEVICES names: the UUID of each by the name that it has there.

    As CUDA reads it: up to the first name of no device.

    Args:
        variable: its value: indices, UUIDs, beginnings of UUIDs, or UUIDs of parts of a GPU (MIG).
        uuids: of this host's GPUs, by their index.
    """
    devices: dict[str, str] = {}
    for name in map(str.strip, variable.split(",")):
        if name.isdecimal():
            found = list(uuids[int(name) : int(name) + 1])
        elif name.startswith("MIG-"):
            found = [name]
        else:
            found = [uuid for uuid in uuids if name.startswith("GPU-") and uuid.startswith(name)]
        if len(found) != 1 or found[0] in devices.values():
            break
        devices[name] = found[0]
    return devices
