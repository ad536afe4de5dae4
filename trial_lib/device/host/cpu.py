"""A host that trains on its processor: a slot is a core."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from trial_lib.device.host.base import DeviceCondition, DeviceState, Host, Tenant
from trial_lib.device.host.memory import host_memory

_HOST_RESERVE = 0.1


class CpuHost:
    """Implements `HostKind` for the cores of a processor."""

    device = "cpu"
    resource = "CPU"
    word = "cpu"
    visible_by: str | None = None
    ranks_option = "--num_accelerators"
    compiler: str | None = None
    computes_on_the_processor = True

    def environment(self, slots: Sequence[str]) -> dict[str, str]:
        """Returns nothing, because a rank is pinned to its core instead."""
        return {}

    def primed_with(self, host: Host, count: int) -> dict[str, str]:
        """Returns nothing, because all cores are alike."""
        return {}

    def refusal(self, host: Host, count: int) -> str | None:
        """Returns None, because cores can be taken together."""
        return None

    def alike(self, host: Host, count: int) -> Host:
        """Returns the host unchanged."""
        return host

    def cores(self, slot: str) -> list[int]:
        """Returns the slot's core; none for another host's slot."""
        return [int(slot)] if slot.isdecimal() else []

    def budget(self, host: Host, asked: int | None) -> int | None:
        """Returns the user's limit, or the slot's share of the host's memory."""
        return host.memory_per_slot if asked is None else asked

    def identity(self, host: Host) -> dict[str, str]:
        """Returns nothing beyond the processor, which every host reports."""
        return {}

    def asked_often(self) -> AbstractContextManager[object]:
        """Opens nothing."""
        return nullcontext()

    def states(self, host: Host, slots: Sequence[str]) -> list[DeviceState]:
        """Returns the cores."""
        return [DeviceState(host.device_of(slot)) for slot in slots]

    def tenants(self, host: Host, slots: Sequence[str]) -> dict[str, list[Tenant]]:
        """Returns nothing: see `HostKind.tenants`."""
        return {}

    def conditions(self, host: Host) -> list[DeviceCondition]:
        """Returns nothing: see `HostKind.conditions`."""
        return []

    def load(self, host: Host, slots: Sequence[str]) -> list[dict[str, float]]:
        """Returns nothing beyond the processor's load, which every host reports."""
        return []


def cores_of_this_process() -> Host:
    """Returns the cores in this process's affinity, and their share of the memory."""
    cores = sorted(os.sched_getaffinity(0))
    memory = int(host_memory() * (1 - _HOST_RESERVE)) // len(cores)
    return Host("cpu", [str(core) for core in cores], memory)
