"""NVML's information on this host's GPUs. Each is asked by itself, so one that fails does not hide the others."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from trial_lib.device.host.memory import host_memory
from trial_lib.wire.errors import InputError

_NO_INSTANCE = "MIG is on, but it has no instances"


@dataclass(frozen=True)
class Gpu:
    """One GPU, a part of one, or an entry for one that cannot be used.

    Attributes:
        uuid: its name; empty if it does not answer.
        model: such as `NVIDIA H100 80GB HBM3`; empty if unknown.
        memory: its bytes; None if unknown.
        instances: the parts that it is cut into (MIG); None if it is not cut.
        why_not: why it cannot be used, in NVML's words; empty if it can.
    """

    uuid: str = ""
    model: str = ""
    memory: int | None = None
    instances: "tuple[Gpu, ...] | None" = None
    why_not: str = ""


@contextlib.contextmanager
def session() -> Iterator[bool]:
    """Opens NVML. Yields whether there is one; a host without a driver has none.

    Raises:
        InputError: there is a driver, but it does not answer.
    """
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield False
        return
    except pynvml.NVMLError as error:
        raise broken_driver(error) from None
    try:
        yield True
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def broken_driver(error: Exception | str) -> InputError:
    """Returns the error for a driver that does not list its GPUs."""
    return InputError(
        f"it cannot say which GPUs there are ({error}).",
        where="the NVIDIA driver",
        remedy="Check with `nvidia-smi`. Usually the driver was updated or lost a GPU, and the host has to restart.",
    )


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver; None without one that answers."""
    with contextlib.suppress(InputError, pynvml.NVMLError), session() as is_there:
        return str(pynvml.nvmlSystemGetDriverVersion()) if is_there else None
    return None


def found_gpus() -> list[Gpu]:
    """Returns the GPUs in NVML's order, which is that of the PCI bus. Call it within a session.

    GPUs that this process may not open are left out, as CUDA leaves them out. A job's device cgroup hides them.

    Raises:
        InputError: the driver does not give the number of GPUs.
    """
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise broken_driver(error) from None
    gpus = []
    for index in range(count):
        with contextlib.suppress(pynvml.NVMLError_NoPermission):
            gpus.append(_gpu(index))
    return gpus


def _gpu(index: int) -> Gpu:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError_NoPermission:
        raise
    except pynvml.NVMLError as error:
        return Gpu(why_not=str(error))
    try:
        gpu = Gpu(uuid, _model(handle), _memory(handle))
    except pynvml.NVMLError as error:
        return Gpu(uuid, _model(handle), why_not=str(error))
    instances = _instances(handle)
    return replace(gpu, instances=instances, why_not=_NO_INSTANCE if instances == () else "")


def _model(handle: Any) -> str:
    with contextlib.suppress(pynvml.NVMLError):
        return str(pynvml.nvmlDeviceGetName(handle))
    return ""


def _memory(handle: Any) -> int | None:
    """Returns the bytes of a device; None if this process may not know.

    In a container with an instance of a GPU, the GPU itself may not be asked (NVIDIA/nvidia-container-toolkit#842).
    """
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:
        # A GPU that uses the host's memory has none of its own.
        return host_memory()
    except pynvml.NVMLError_NoPermission:
        return None


def _instances(handle: Any) -> tuple[Gpu, ...] | None:
    """Returns the parts that a GPU is cut into; None if it is not cut."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        # Only some models can be cut.
        return None
    instances = []
    for position in range(most):
        # The places of instances that do not exist are empty.
        with contextlib.suppress(pynvml.NVMLError):
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position)
            instances.append(Gpu(str(pynvml.nvmlDeviceGetUUID(instance)), _model(instance), _memory(instance)))
    return tuple(instances)
