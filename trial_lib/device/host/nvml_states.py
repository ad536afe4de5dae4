"""NVML's information on a GPU at work. Call everything within a session. Unknown values are left out."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from trial_lib.device.host.base import DeviceCondition, DeviceState, Tenant

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
    """Returns the present state of a GPU, or of an instance of one.

    Args:
        uuid: its name.
        model: its model.
    """
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
    """Returns the handles of an instance and of its GPU. For a whole GPU both are its own. None for no GPU."""
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
    """Returns the processes that compute on a GPU."""
    found = _asked(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))) or []
    return [Tenant(int(each.pid), each.usedGpuMemory) for each in found if not _is_server(int(each.pid))]


def _is_server(pid: int) -> bool:
    name = _asked(lambda: str(pynvml.nvmlSystemGetProcessName(pid)))
    return name is not None and name.endswith(_OF_ALL)


def load_of(uuid: str) -> dict[str, float]:
    """Returns the present load of a GPU."""
    load: dict[str, float] = {}
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        load["memory_used"] = float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        load["utilization"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    return load


def condition_of(uuid: str, model: str) -> DeviceCondition:
    """Returns the properties of a GPU that may disturb a study.

    Args:
        uuid: its name.
        model: its model.
    """
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
    """Returns the faults of a GPU's memory."""
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
