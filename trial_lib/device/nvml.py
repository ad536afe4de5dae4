"""NVML's information on this host's GPUs. Each is asked by itself, so one that fails does not hide the others."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml

from zerotune.trial_lib.device.base import host_memory
from zerotune.trial_lib.messages.errors import InputError

_NO_INSTANCE = "MIG is on, but it has no instances"


@dataclass(frozen=True)
class Gpu:
    """One GPU, a part of one, or an entry for one that cannot be used."""

    uuid: str = ""  # its name; empty if it does not answer
    model: str = ""  # such as `NVIDIA H100 80GB HBM3`; empty if unknown
    memory: int | None = None  # its bytes; None if unknown
    instances: "tuple[Gpu, ...] | None" = None  # the parts that it is cut into (MIG); None if it is not cut
    why_not: str = ""  # why it cannot be used, in NVML's words; empty if it can


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
    return InputError(
        f"it cannot say which GPUs there are ({error}).",
        where="the NVIDIA driver",
        remedy="Check with `nvidia-smi`. Usually the driver was updated or lost a GPU, and the host has to restart.",
    )


def driver_version() -> str | None:
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
    # Returns the bytes of a device; None if this process may not know. In a container with an instance of a GPU, the
    # GPU itself may not be asked (NVIDIA/nvidia-container-toolkit#842).
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:
        # A GPU that uses the host's memory has none of its own.
        return host_memory()
    except pynvml.NVMLError_NoPermission:
        return None


def _instances(handle: Any) -> tuple[Gpu, ...] | None:
    # The parts that a GPU is cut into; None if it is not cut.
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


# The GPUs that CUDA_VISIBLE_DEVICES names, and their names in a trial.

VARIABLE = "CUDA_VISIBLE_DEVICES"
# Slurm and the container toolkit hide all devices by these values.
_NONE = ("", "NoDevFiles", "none", "void")
_UNASKED = "Check it with `nvidia-smi`, or leave it out of CUDA_VISIBLE_DEVICES."


@dataclass
class Visible:
    devices: dict[str, str] = field(default_factory=dict)  # the UUID of each device, by its name for the ranks
    memory: dict[str, int] = field(default_factory=dict)  # the bytes of each, by its UUID, if known
    models: dict[str, str] = field(default_factory=dict)  # the model of each, by its UUID
    notes: list[str] = field(default_factory=list)  # notes for the user, a sentence each

    def add(self, name: str, device: Gpu) -> None:
        self.devices[name] = device.uuid
        self.models[device.uuid] = device.model
        if device.memory is not None:
            self.memory[device.uuid] = device.memory


def hides_all(variable: str | None) -> bool:
    """Returns whether a value of the variable hides all devices from CUDA, as `""` and `-1` do."""
    first = None if variable is None else variable.split(",")[0].strip()
    return first is not None and (first in _NONE or first.startswith("-"))


def every_device(gpus: Sequence[Gpu]) -> Visible:
    """Returns the devices of a host if the variable is not set.

    CUDA shows a process either whole GPUs or one instance. So instances are slots only if there are no whole GPUs.

    Raises:
        InputError: there are GPUs, but none can be used.
    """
    found = Visible()
    whole = [gpu for gpu in gpus if not gpu.why_not and gpu.instances is None]
    cut = [gpu for gpu in gpus if not gpu.why_not and gpu.instances is not None]
    for gpu in whole:
        found.add(_name(gpu, gpus), gpu)
    if not whole:
        for instance in (instance for gpu in cut for instance in gpu.instances or ()):
            found.add(instance.uuid, instance)
    elif cut:
        found.notes.append(
            f"{len(cut)} GPU(s) are cut into instances (MIG) and left out. To tune on these, name them in {VARIABLE}."
        )
    for number, gpu in enumerate(gpus):
        if gpu.why_not and found.devices:
            found.notes.append(f"GPU {number} cannot be used ({gpu.why_not}), and is left out.")
    if gpus and not found.devices:
        raise _unusable("GPU 0", gpus[0])
    return found


def named_devices(variable: str, gpus: Sequence[Gpu], numbered: Sequence[Gpu] | None = None) -> Visible:
    """Returns the devices of a value of the variable, as CUDA reads it: up to the first unknown name.

    Raises:
        InputError: a named device cannot be used.
    """
    found = Visible()
    for name in map(str.strip, variable.split(",")):
        gpu = _gpu_called(name, gpus, gpus if numbered is None else numbered)
        if gpu is None:
            # A GPU that does not tell its UUID may be that one.
            nameless = next((number for number, each in enumerate(gpus) if not each.uuid), None)
            if nameless is not None and name.startswith("GPU-"):
                raise _unusable(f"{name}, or GPU {nameless},", gpus[nameless])
            break
        if gpu.why_not:
            raise _unusable(f"GPU {name}", gpu)
        # CUDA shows the first part of a GPU that is cut into instances.
        device = next(iter(gpu.instances or ()), gpu)
        if device.uuid in found.devices.values():
            break
        found.add(_name(gpu, gpus) if name.isdecimal() else name, device)
    return found


def _gpu_called(name: str, gpus: Sequence[Gpu], numbered: Sequence[Gpu]) -> Gpu | None:
    # The one GPU, or instance of one, with a name; None for an unknown or ambiguous name.
    if name.startswith("MIG-"):
        parts = [part for gpu in gpus for part in gpu.instances or () if part.uuid.startswith(name)]
        # A name of older drivers (MIG-GPU-.../1/0), or of instances that may not be asked. CUDA will know it.
        parts = parts or [Gpu(name)]
    elif name.isdecimal():
        parts = list(numbered[int(name) : int(name) + 1])
    else:
        parts = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    return parts[0] if len(parts) == 1 else None


def _name(gpu: Gpu, gpus: Sequence[Gpu]) -> str:
    # Returns the name of a GPU for the ranks: its index, if that is surely CUDA's index as well. Programs expect an
    # index. DeepSpeed itself reads CUDA_VISIBLE_DEVICES as whole numbers at stages 1 and 2
    # (accelerator/cuda_accelerator.py, _get_nvml_gpu_id), and fails with a UUID.
    position = next(number for number, each in enumerate(gpus) if each is gpu)
    # It is documented nowhere whether CUDA counts a GPU that does not answer.
    is_sure = all(each.uuid for each in gpus[:position])
    return str(position) if is_sure else gpu.uuid


def _unusable(what: str, gpu: Gpu) -> InputError:
    return InputError(f"{what} cannot be used ({gpu.why_not}).", where="the NVIDIA driver", remedy=_UNASKED)
