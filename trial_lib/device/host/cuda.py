"""A host that trains on NVIDIA's GPUs, as NVML tells of them."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pynvml

from trial_lib.device.host.base import Host
from trial_lib.device.host.memory import host_memory
from trial_lib.experiment.errors import InputError


class Cuda:
    """Answers `HostKind` for GPUs."""

    device = "cuda"
    resource = "GPU"
    word = "gpu"
    visible_by: str | None = "CUDA_VISIBLE_DEVICES"
    ranks_option = "--num_gpus"
    computes_on_the_processor = False

    def environment(self, slots: Sequence[str]) -> dict[str, str]:
        """Returns the GPUs as the slots are named, which count them as NVML does."""
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(slots)}

    def cores(self, slot: str) -> list[int]:
        """Returns none: the rank of a GPU may use every core."""
        return []

    def budget(self, host: Host, asked: int | None) -> int | None:
        """Returns what is asked for: without a wish a rank has all of its GPU."""
        return asked

    def identity(self, host: Host) -> dict[str, str]:
        """Returns the names of the GPUs and the driver's version; nothing where they are other hosts' of a cluster."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return {}
        try:
            handles = list(map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())))
            # A part of a GPU is none of them by its name.
            own = [each for each in handles if pynvml.nvmlDeviceGetUUID(each) in host.devices.values()] or handles
            names = {str(pynvml.nvmlDeviceGetName(handle)) for handle in own}
            return {"GPU": ", ".join(sorted(names)), "driver": str(pynvml.nvmlSystemGetDriverVersion())}
        finally:
            pynvml.nvmlShutdown()

    def load(self, host: Host, slots: Sequence[str]) -> list[dict[str, float]]:
        """Returns what NVML knows of each GPU now; what it does not is missing."""
        loads: list[dict[str, float]] = []
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                loads = [_load(host.device_of(slot)) for slot in slots]
            finally:
                pynvml.nvmlShutdown()
        return loads


def _load(uuid: str) -> dict[str, float]:
    load: dict[str, float] = {}
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        load["memory_used"] = float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        load["utilization"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    return load


def gpus(variable: str | None) -> Host | None:
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
        found = {pynvml.nvmlDeviceGetUUID(handle): _memory(handle) for handle in handles}
    except pynvml.NVMLError as error:
        raise _broken_driver(error) from None
    finally:
        pynvml.nvmlShutdown()
    devices = visible_devices(",".join(map(str, range(len(found)))) if variable is None else variable, list(found))
    if not devices:
        return None
    memory = min(found.get(device, min(found.values())) for device in devices.values())
    return Host("cuda", list(devices), memory, devices)


def _memory(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:
        # A GPU that has the host's memory has none of its own to tell of.
        return host_memory()


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
