"""A host with GPUs as NVML tells of it: what the tests share that need none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest


@dataclass
class Memory:
    total: int
    used: int = 0


@dataclass
class Process:
    pid: int
    usedGpuMemory: int | None  # noqa: N815 - NVML's own name


@dataclass
class Utilization:
    gpu: int


@dataclass
class PretendGpu:
    """What NVML says of one GPU, or of an instance of one.

    Attributes:
        uuid: its name.
        memory: its bytes.
        used: bytes of it.
        model: what it is.
        memory_error: the error number that asking for these ends in; None for none.
        handle_error: the error number that asking for it by its index ends in; None for none.
        instances: its parts; None where it is not cut into any.
        processes: that compute on it.
        said: what else NVML answers, by the function's name; an error for what is not there.
    """

    uuid: str
    memory: int = 80 * 2**30
    used: int = 0
    model: str = "NVIDIA H100 80GB HBM3"
    memory_error: int | None = None
    handle_error: int | None = None
    instances: "Sequence[PretendGpu] | None" = None
    processes: list[Process] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)


# What a healthy card at work says, for each that says nothing else.
_SAID: dict[str, Any] = {
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetComputeMode": pynvml.NVML_COMPUTEMODE_DEFAULT,
    "nvmlDeviceGetCurrentClocksEventReasons": 0,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetRetiredPagesPendingStatus": 0,
    "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
}


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, gpus: "Mapping[str, int] | Sequence[PretendGpu]") -> list[PretendGpu]:
    """Has NVML answer that this host has these GPUs, in the order of their indices.

    Args:
        monkeypatch: pytest's.
        gpus: each, or the memory of each by its UUID.

    Returns:
        The GPUs, which a test may change from then on.
    """
    listed = [PretendGpu(uuid, memory) for uuid, memory in gpus.items()] if isinstance(gpus, Mapping) else list(gpus)

    def by_index(index: int) -> PretendGpu:
        if listed[index].handle_error is not None:
            raise pynvml.NVMLError(listed[index].handle_error)
        return listed[index]

    def by_uuid(uuid: str) -> PretendGpu:
        for gpu in listed:
            for each in (gpu, *(gpu.instances or ())):
                if each.uuid == uuid:
                    if gpu.handle_error is not None:
                        raise pynvml.NVMLError(gpu.handle_error)
                    return each
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def memory(gpu: PretendGpu) -> Memory:
        if gpu.memory_error is not None:
            raise pynvml.NVMLError(gpu.memory_error)
        return Memory(gpu.memory, gpu.used)

    def mig_mode(gpu: PretendGpu) -> list[int]:
        return [int(gpu.instances is not None)] * 2

    def instance(gpu: PretendGpu, index: int) -> PretendGpu:
        instances = gpu.instances or ()
        if index >= len(instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return instances[index]

    def parent(instance: PretendGpu) -> PretendGpu:
        for gpu in listed:
            if any(each is instance for each in gpu.instances or ()):
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def says(name: str) -> Callable[..., Any]:
        def answer(gpu: PretendGpu, *_: Any) -> Any:
            said = gpu.said.get(name, _SAID.get(name, pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)))
            if isinstance(said, Exception):
                raise said
            return said

        return answer

    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.95.05")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(listed))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", by_index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", by_uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda gpu: gpu.uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda gpu: gpu.model)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", mig_mode)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", parent)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxMigDeviceCount", lambda gpu: 7)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", instance)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda gpu: list(gpu.processes))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda gpu: Utilization(87))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", says("nvmlDeviceGetClockInfo"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", says("nvmlDeviceGetTemperature"))
    for name in _SAID:
        monkeypatch.setattr(pynvml, name, says(name))
    return listed
