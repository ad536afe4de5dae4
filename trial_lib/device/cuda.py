"""A host that trains on PyTorch's `cuda`: NVIDIA's GPUs, as NVML reports them, or AMD's, as the kernel does."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from zerotune.trial_lib.device.base import DeviceCondition, DeviceState, Host, HostKind, Tenant
from zerotune.trial_lib.device.cuda_variables import BY_BUS, ORDER, cuda_order
from zerotune.trial_lib.device.nvml import (
    VARIABLE,
    Gpu,
    Visible,
    driver_version,
    every_device,
    found_gpus,
    hides_all,
    named_devices,
    session,
)
from zerotune.trial_lib.messages.errors import InputError

# The kernel's information on this host's AMD GPUs. It needs none of AMD's libraries.

ROCM_VARIABLE, HIP_VARIABLE = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
"""ROCm's runtime reads the first, leaves out devices and renumbers the others. HIP does the same with the second."""

_KFD_DEV, _NODES = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")
# HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE: the device's own memory.
_OWN_MEMORY = (1, 2)


def is_driver_there() -> bool:
    return (_KFD_DEV / "kfd").exists()


def amd_gpus(variables: Mapping[str, str]) -> list[Gpu]:
    """Returns the GPUs that a process may open, in HIP's order; none without a driver.

    Graphics in a processor are not GPUs to tune on.
    """
    if not is_driver_there():
        return []
    nodes = sorted((path for path in _NODES.glob("[0-9]*") if path.name.isdecimal()), key=lambda path: int(path.name))
    found = [gpu for gpu in map(_gpu, nodes) if gpu is not None]
    shown = variables.get(ROCM_VARIABLE)
    return found if shown is None else _shown(shown, found)


def _shown(variable: str, gpus: list[Gpu]) -> list[Gpu]:
    shown: list[Gpu] = []
    for name in map(str.strip, variable.split(",")):
        if name.isdecimal():
            named = gpus[int(name) : int(name) + 1]
        else:
            named = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if len(named) != 1 or named[0] in shown:
            break
        shown += named
    return shown


def _gpu(node: Path) -> Gpu | None:
    # The GPU of a node of the topology; None for a processor, or for a GPU that this process may not open.
    has = _numbers(node / "properties")
    if not has.get("simd_count") or has.get("cpu_cores_count"):
        return None
    render = f"renderD{has.get('drm_render_minor', 0)}"
    if not os.access(_KFD_DEV / "dri" / render, os.R_OK | os.W_OK):
        return None
    banks = [_numbers(bank) for bank in node.glob("mem_banks/*/properties")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _OWN_MEMORY)
    # Cards from before 2018 have no unique number.
    place = f"{has.get('domain', 0):04x}:{has.get('location_id', 0):04x}"
    uuid = f"GPU-{has['unique_id']:016x}" if has.get("unique_id") else f"AMD-{place}"
    return Gpu(uuid=uuid, model=_model(node, render), memory=memory or None)


def _model(node: Path, render: str) -> str:
    for path in (Path("/sys/class/drm") / render / "device" / "product_name", node / "name"):
        with contextlib.suppress(OSError):
            if name := path.read_text().strip():
                return name
    return ""


def _numbers(properties: Path) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        words = properties.read_text().split()
        return dict(zip(words[::2], map(int, words[1::2]), strict=False))
    return {}


# NVML's information on a GPU at work. Call everything within a session. Unknown values are left out.

_Answer = TypeVar("_Answer")
# By NVML's names of the bits. An older binding may lack some.
_IDLE = "GpuIdle"
_HELD_DOWN = {
    "ApplicationsClocksSetting": "clocks that were set",
    "SwPowerCap": "its power limit",
    "HwSlowdown": "a hardware slowdown",
    "SyncBoost": "another GPU of its group",
    "SwThermalSlowdown": "its temperature",
    "HwThermalSlowdown": "its temperature (hardware)",
    "HwPowerBrakeSlowdown": "the power supply",
    "DisplayClockSetting": "a display",
}
# This process serves the clients of one GPU, and computes nothing.
_OF_ALL = "nvidia-cuda-mps-server"


def state_of(uuid: str, model: str) -> DeviceState:
    # The parts of a GPU share its clock, power and heat, so the GPU itself is asked for these.
    _, handle = _part_and_whole(uuid)
    if handle is None:
        return DeviceState(uuid, model)
    reasons = _asked(lambda: _reasons(handle)) or 0
    limit = _asked(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return DeviceState(
        uuid,
        model,
        clock=_asked(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))),
        power_limit=None if limit is None else limit / 1000,
        temperature=_asked(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
        held_down=tuple(said for name, said in _HELD_DOWN.items() if reasons & _bit(name)),
        is_idle=bool(reasons & _bit(_IDLE)),
    )


def _part_and_whole(uuid: str) -> tuple[Any, Any]:
    # The handles of an instance and of its GPU. For a whole GPU both are its own. None for no GPU.
    part = _asked(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
    if part is None:
        return None, None
    return part, _asked(lambda: pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)) or part


def _reasons(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:
        # The driver has only the older name.
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _bit(name: str) -> int:
    return int(getattr(pynvml, f"nvmlClocksEventReason{name}", 0))


def tenants_of(uuid: str) -> list[Tenant]:
    found = _asked(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))) or []
    return [Tenant(int(each.pid), each.usedGpuMemory) for each in found if not _is_server(int(each.pid))]


def _is_server(pid: int) -> bool:
    name = _asked(lambda: str(pynvml.nvmlSystemGetProcessName(pid)))
    return name is not None and name.endswith(_OF_ALL)


def load_of(uuid: str) -> dict[str, float]:
    load: dict[str, float] = {}
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        load["memory_used"] = float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        load["utilization"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    return load


def condition_of(uuid: str, model: str) -> DeviceCondition:
    part, whole = _part_and_whole(uuid)
    if part is None:
        return DeviceCondition(uuid, model)
    memory = _asked(lambda: pynvml.nvmlDeviceGetMemoryInfo(part))
    mig = _asked(lambda: pynvml.nvmlDeviceGetMigMode(whole))
    mode = _asked(lambda: pynvml.nvmlDeviceGetComputeMode(whole))
    persists = _asked(lambda: pynvml.nvmlDeviceGetPersistenceMode(whole))
    return DeviceCondition(
        uuid,
        model,
        memory=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        is_closed=mode == pynvml.NVML_COMPUTEMODE_PROHIBITED,
        is_exclusive=mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        is_cut=mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        forgets=persists == pynvml.NVML_FEATURE_DISABLED,
        faults=tuple(_faults(whole)),
        tenants=tuple(tenants_of(uuid)),
    )


def _faults(handle: Any) -> list[str]:
    rows = _asked(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    pages = _asked(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    faults = ["rows of its memory are broken, and it has no spare rows left"] if rows and rows[3] else []
    if (rows and rows[2]) or pages:
        faults.append("memory that had errors is disabled at the next reset")
    return faults


def _asked(ask: Callable[[], _Answer]) -> _Answer | None:
    with contextlib.suppress(pynvml.NVMLError):
        return ask()
    return None


_DEV = Path("/dev")


class CudaHost(HostKind):
    device = "cuda"
    resource = "GPU"
    word = "gpu"
    visible_by: str | None = "CUDA_VISIBLE_DEVICES"
    ranks_option = "--num_gpus"
    compiler: str | None = "nvcc"
    computes_on_the_processor = False

    def environment(self, slots: Sequence[str]) -> dict[str, str]:
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

    def identity(self, host: Host) -> dict[str, str]:
        names = {host.models[device] for device in map(host.device_of, host.slots) if device in host.models}
        version = driver_version()
        return {} if version is None else {"GPU": ", ".join(sorted(names)), "driver": version}

    def asked_often(self) -> contextlib.AbstractContextManager[object]:
        opened = contextlib.ExitStack()
        with contextlib.suppress(InputError):
            opened.enter_context(session())
        return opened

    def states(self, host: Host, slots: Sequence[str]) -> list[DeviceState]:
        """Of a GPU on another host it is only the name."""
        devices = list(map(host.device_of, slots))
        found = _of_each(devices, lambda device: state_of(device, host.models.get(device, "")))
        return found or list(map(DeviceState, devices))

    def tenants(self, host: Host, slots: Sequence[str]) -> dict[str, list[Tenant]]:
        """In a container there may be none."""
        devices = list(map(host.device_of, slots))
        return dict(zip(devices, _of_each(devices, tenants_of), strict=False))

    def conditions(self, host: Host) -> list[DeviceCondition]:
        devices = list(map(host.device_of, host.slots))
        return _of_each(devices, lambda device: condition_of(device, host.models.get(device, "")))

    def load(self, host: Host, slots: Sequence[str]) -> list[dict[str, float]]:
        return _of_each(list(map(host.device_of, slots)), load_of)


def _of_each(devices: Sequence[str], ask: Callable[[str], _Answer]) -> list[_Answer]:
    # What NVML says of each device; empty if it does not answer.
    with contextlib.suppress(InputError), session():
        return list(map(ask, devices))
    return []


def gpus(variable: str | None, variables: Mapping[str, str]) -> Host | None:
    """Returns the GPUs that a value of CUDA_VISIBLE_DEVICES names, or all for None. None if this host has none.

    GPUs that do not answer are an `InputError`. The user would not want to tune on the processor instead.
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
    # The devices that a value names. An index has the meaning that it has for CUDA in that environment.
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
