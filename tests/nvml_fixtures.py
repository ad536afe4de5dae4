"""A host with GPUs as NVML tells of it: what the tests share that need none."""

from collections.abc import Mapping

import pynvml
import pytest


class Info:
    def __init__(self, total: int) -> None:
        self.total = total


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, memory: Mapping[str, int]) -> None:
    """Has NVML answer that this host has these GPUs: the memory of each by its UUID, in the order of their indices."""
    uuids = list(memory)
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(uuids))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: uuids[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: Info(memory[handle]))
