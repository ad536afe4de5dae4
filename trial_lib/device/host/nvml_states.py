"""What NVML says of a GPU at work. All within a session; what cannot be told is left out."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from trial_lib.device.host.base import DeviceState, Tenant

_Answer = TypeVar("_Answer")
_IDLE = pynvml.nvmlClocksEventReasonGpuIdle
_HELD_DOWN = {
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "clocks that were set",
    pynvml.nvmlClocksEventReasonSwPowerCap: "its power limit",
    pynvml.nvmlClocksEventReasonHwSlowdown: "a hardware slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "another GPU of its group",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "its temperature",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "its temperature (hardware)",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "the power supply",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "a display",
}
# It runs for the clients of one GPU, and computes nothing.
_OF_ALL = "nvidia-cuda-mps-server"


def state_of(uuid: str, model: str) -> DeviceState:
    """Returns how a GPU, or an instance of one, is now.

    Args:
        uuid: its name.
        model: what it is.
    """
    handle = _asked(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
    if handle is None:
        return DeviceState(uuid, model)
    # The parts of a GPU share its clock, its power and its heat, for which it is asked itself.
    handle = _asked(lambda: pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) or handle
    reasons = _asked(lambda: _reasons(handle)) or 0
    limit = _asked(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return DeviceState(
        uuid,
        model,
        clock=_asked(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))),
        power_limit=None if limit is None else limit / 1000,
        temperature=_asked(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
        held_down=tuple(said for bit, said in _HELD_DOWN.items() if reasons & bit),
        is_idle=bool(reasons & _IDLE),
    )


def _reasons(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:
        # A driver that has the older name alone.
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def tenants_of(uuid: str) -> list[Tenant]:
    """Returns the processes that compute on a GPU."""
    found = _asked(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))) or []
    return [Tenant(int(each.pid), each.usedGpuMemory) for each in found if not _is_server(int(each.pid))]


def _is_server(pid: int) -> bool:
    name = _asked(lambda: str(pynvml.nvmlSystemGetProcessName(pid)))
    return name is not None and name.endswith(_OF_ALL)


def load_of(uuid: str) -> dict[str, float]:
    """Returns what a GPU is busy with now."""
    load: dict[str, float] = {}
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        load["memory_used"] = float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        load["utilization"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    return load


def _asked(ask: Callable[[], _Answer]) -> _Answer | None:
    with contextlib.suppress(pynvml.NVMLError):
        return ask()
    return None
