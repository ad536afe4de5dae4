"""A host that trains on PyTorch's `cuda`: NVIDIA's GPUs, as NVML reports them, or AMD's, as the kernel does."""

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trial_lib.device.host.base import DeviceCondition, DeviceState, Host, Tenant
from trial_lib.device.host.cuda_order import BY_BUS, ORDER, cuda_order
from trial_lib.device.host.kfd import HIP_VARIABLE, amd_gpus, is_driver_there
from trial_lib.device.host.nvml import Gpu, driver_version, found_gpus, session
from trial_lib.device.host.nvml_states import condition_of, load_of, state_of, tenants_of
from trial_lib.device.host.visible import VARIABLE, Visible, every_device, hides_all, named_devices
from trial_lib.wire.errors import InputError

_DEV = Path("/dev")


class CudaHost:
    """Implements `HostKind` for GPUs."""

    device = "cuda"
    resource = "GPU"
    word = "gpu"
    visible_by: str | None = "CUDA_VISIBLE_DEVICES"
    ranks_option = "--num_gpus"
    compiler: str | None = "nvcc"
    computes_on_the_processor = False

    def environment(self, slots: Sequence[str]) -> dict[str, str]:
        """Returns the GPUs by the names of the slots, in the order of NVML, or of the kernel for AMD's."""
        names = ",".join(slots)
        # HIP reads both, and its own first.
        hip = {HIP_VARIABLE: names} if is_driver_there() else {}
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": names, **hip}

    def primed_with(self, host: Host, count: int) -> dict[str, str]:
        """Returns the variables of a trial's ranks, with a whole GPU instead of an instance.

        torch counts instances by asking CUDA, and then the process cannot fork. It counts a GPU that is cut by NVML.
        """
        # These variables do not show other hosts' GPUs.
        slots = [slot for slot in host.slots[:count] if slot in host.devices]
        if not slots:
            return {}
        parents: dict[str, str] = {}
        if any(_is_instance(host.device_of(slot)) for slot in slots):
            with contextlib.suppress(InputError), session() as is_there:
                gpus = found_gpus() if is_there else []
                parents = {part.uuid: str(number) for number, gpu in enumerate(gpus) for part in gpu.instances or ()}
        names = [parents.get(host.device_of(slot), slot) for slot in slots]
        return self.environment(list(dict.fromkeys(names)))

    def refusal(self, host: Host, count: int) -> str | None:
        """Returns why instances of a GPU cannot train together."""
        if count == 1 or not any(_is_instance(host.device_of(slot)) for slot in host.slots):
            return None
        return "CUDA shows a process only one instance of a GPU (MIG), so a trial can have only one."

    def alike(self, host: Host, count: int) -> Host:
        """Returns the GPUs of one model: the model with the most memory in total, if a trial has enough of them."""
        models = {slot: host.models.get(host.device_of(slot), "") for slot in host.slots}
        if count >= len(host.slots) or len(set(models.values())) < 2:
            return host

        def rank(model: str) -> tuple[bool, int]:
            slots = [slot for slot in host.slots if models[slot] == model]
            return len(slots) >= count, sum(host.memory.get(host.device_of(slot), 0) for slot in slots)

        best = max(dict.fromkeys(models.values()), key=rank)
        if not rank(best)[0]:
            return host
        slots = [slot for slot in host.slots if models[slot] == best]
        note = (
            f"The GPUs differ, but trials must be comparable. So they run only on {best or 'GPUs of no known model'} "
            f"({', '.join(slots)}). Name others in {VARIABLE} to tune on these."
        )
        memory = min(host.memory.get(host.device_of(slot), 0) for slot in slots)
        return replace(host, slots=slots, memory_per_slot=memory, notes=(*host.notes, note))

    def cores(self, slot: str) -> list[int]:
        """Returns none, because the rank of a GPU may use every core."""
        return []

    def budget(self, host: Host, asked: int | None) -> int | None:
        """Returns the user's limit. Without one a rank has all of its GPU."""
        return asked

    def identity(self, host: Host) -> dict[str, str]:
        """Returns the names of the GPUs and the driver's version; nothing for other hosts of a cluster."""
        names = {host.models[device] for device in map(host.device_of, host.slots) if device in host.models}
        version = driver_version()
        return {} if version is None else {"GPU": ", ".join(sorted(names)), "driver": version}

    def asked_often(self) -> contextlib.AbstractContextManager[object]:
        """Opens a session of NVML, which counts its users."""
        opened = contextlib.ExitStack()
        with contextlib.suppress(InputError):
            opened.enter_context(session())
        return opened

    def states(self, host: Host, slots: Sequence[str]) -> list[DeviceState]:
        """Returns NVML's state of each GPU. Of a GPU on another host it is only the name."""
        devices = list(map(host.device_of, slots))
        with contextlib.suppress(InputError), session():
            return [state_of(device, host.models.get(device, "")) for device in devices]
        return list(map(DeviceState, devices))

    def tenants(self, host: Host, slots: Sequence[str]) -> dict[str, list[Tenant]]:
        """Returns NVML's processes of each GPU. In a container there may be none."""
        with contextlib.suppress(InputError), session():
            return {device: tenants_of(device) for device in map(host.device_of, slots)}
        return {}

    def conditions(self, host: Host) -> list[DeviceCondition]:
        """Returns NVML's condition of each GPU."""
        with contextlib.suppress(InputError), session():
            return [condition_of(device, host.models.get(device, "")) for device in map(host.device_of, host.slots)]
        return []

    def load(self, host: Host, slots: Sequence[str]) -> list[dict[str, float]]:
        """Returns NVML's load of each GPU now, without values that it does not know."""
        with contextlib.suppress(InputError), session():
            return [load_of(host.device_of(slot)) for slot in slots]
        return []


def gpus(variable: str | None, variables: Mapping[str, str]) -> Host | None:
    """Returns the GPUs that a value of CUDA_VISIBLE_DEVICES names, or all of them. None if this host has none.

    Args:
        variable: the value; None for all GPUs.
        variables: the environment of the process that will use them.

    Raises:
        InputError: there are GPUs, but they do not answer. The user would not want to tune on the processor instead.
    """
    with session() as is_there:
        found = found_gpus() if is_there else []
    amds = [] if found else amd_gpus(variables)
    if not is_there and not amds:
        _refuse_unasked(variable)
        return None
    if amds:
        variable = variables.get(HIP_VARIABLE, variable)
    if hides_all(variable) or (variable is None and not (found or amds)):
        return None
    if variable is None:
        visible = every_device(found or amds)
    else:
        visible = named_devices(variable, amds) if amds else _named(variable, found, variables)
    if not visible.devices:
        raise InputError(
            f"{VARIABLE}={variable} names no GPU of this host: this process may open {len(found)}.",
            where="the environment",
            remedy=f'Name one, or set {VARIABLE}="" to tune on the processor.',
        )
    # The memory of an instance that may not be asked is not known before the profile trial.
    least = min(visible.memory.get(device, 0) for device in visible.devices.values())
    return Host(
        "cuda",
        list(visible.devices),
        least,
        devices=visible.devices,
        models=visible.models,
        memory=visible.memory,
        notes=tuple(visible.notes),
    )


def _named(variable: str, found: Sequence[Gpu], variables: Mapping[str, str]) -> Visible:
    """Returns the devices that a value names. An index has the meaning that it has for CUDA in that environment."""
    by_index = any(name.strip().isdecimal() for name in variable.split(","))
    if not by_index or variables.get(ORDER) == BY_BUS or len({gpu.model for gpu in found if gpu.model}) < 2:
        return named_devices(variable, found)
    order = cuda_order(variables)
    numbered = [gpu for uuid in order for gpu in found if gpu.uuid == uuid]
    visible = named_devices(variable, found, numbered or None)
    chosen = ", ".join(f"{visible.models[uuid]} (slot {name})" for name, uuid in visible.devices.items())
    how = "the driver counts them" if not numbered else "CUDA counts them"
    visible.notes.append(f"The GPUs of this host differ: {VARIABLE}={variable} is {chosen}, as {how}.")
    return visible


def _refuse_unasked(variable: str | None) -> None:
    """Refuses a host with GPUs but without a library that can ask them.

    Raises:
        InputError: it is such a host.
    """
    sign = next(map(str, sorted(_DEV.glob("nvidia[0-9]*"))), None)
    if sign is None and (_DEV / "dxg").exists() and _has_cuda():
        # Windows' subsystem for Linux has one device for all GPUs, of any make.
        sign = str(_DEV / "dxg")
    if sign is None or hides_all(variable):
        return
    raise InputError(
        f"the host has GPUs ({sign}), but NVML does not answer here.",
        where="the NVIDIA driver",
        remedy="Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or check with `nvidia-smi`. "
        f'{VARIABLE}="" tunes on the processor.',
    )


def _has_cuda() -> bool:
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return False


def _is_instance(uuid: str) -> bool:
    return uuid.startswith("MIG-")
