"""A host and its devices, and the interface that every kind of host implements."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Host:
    """The devices of this host that trials may use."""

    device: str  # `cuda` or `cpu`
    # The address of each: the index or UUID of a GPU as in CUDA_VISIBLE_DEVICES, or the number of a core
    slots: list[str]
    # Bytes of one device, 0 if unknown. On a CPU it is the host's memory divided by the slots, less a reserve of a
    # tenth.
    memory_per_slot: int
    # The UUID of each slot's GPU, because CUDA_VISIBLE_DEVICES has many spellings for one GPU
    devices: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)  # the model of each GPU, by its UUID, if known
    memory: Mapping[str, int] = field(default_factory=dict)  # the bytes of each GPU, by its UUID, if known
    notes: tuple[str, ...] = ()  # notes on the choice of devices for the user, a sentence each

    def device_of(self, slot: str) -> str:
        """Returns the name of a slot's device, which is the same for all processes on this host."""
        return self.devices.get(slot, slot)


@dataclass(frozen=True)
class DeviceState:
    """The state of a device at work. Unknown values are None or empty."""

    device: str  # its name, as from `Host.device_of`
    model: str = ""  # its model
    clock: int | None = None  # of its processors, in MHz
    power_limit: float | None = None  # in W
    temperature: int | None = None  # in degrees Celsius
    held_down: tuple[str, ...] = ()  # why its clock is lower than it could be
    is_idle: bool = False  # whether nothing runs on it. Then its clock means nothing.


@dataclass(frozen=True)
class Tenant:
    pid: int  # its number for the driver, which may differ from the number in this process's container
    memory: int | None = None  # bytes of the device that it holds; None if unknown


@dataclass(frozen=True)
class DeviceCondition:
    """Properties of a device that may disturb a study. Unknown values are None or false."""

    device: str  # its name, as from `Host.device_of`
    model: str = ""  # its model
    memory: int | None = None  # its bytes
    memory_used: int | None = None  # the bytes in use now, including the driver's
    is_closed: bool = False  # whether no process may compute on it
    is_exclusive: bool = False  # whether only one process at a time may compute on it
    is_cut: bool = False  # whether it is cut into instances, or is one of them
    forgets: bool = False  # whether the driver unloads its state when it is unused, and loads it again for each trial
    faults: tuple[str, ...] = ()  # faults of its memory, in words
    tenants: tuple[Tenant, ...] = ()  # the processes that compute on it now


class HostKind:
    """The differences between a host that trains on its accelerators and one that trains on its processor.

    What is not overridden holds for a processor: its cores are alike, and every process of a host computes there.
    """

    device: str  # the name of the devices in torch and DeepSpeed
    resource: str  # their name in Ray
    word: str  # their name in `accelerate launch` and torchrun
    visible_by: str | None  # the environment variable that chooses the devices of a process; None if there is none
    ranks_option: str  # the option of the `deepspeed` launcher for their number
    compiler: str | None  # the compiler of DeepSpeed's operators for them, beside a C++ compiler; None for none
    # Whether the processor is the device. Then its time measures a step, its memory is the slots', and nothing can be
    # offloaded.
    computes_on_the_processor: bool

    def environment(self, slots: Sequence[str]) -> dict[str, str]:
        """Returns the variables that show a trial's ranks its slots and nothing else."""
        return {}

    def primed_with(self, host: Host, count: int) -> dict[str, str]:
        """Returns the variables of a process that imports and builds for trials of `count` slots.

        It sees the devices that a trial sees, because DeepSpeed's operators are built for them.
        """
        return {}

    def refusal(self, host: Host, count: int) -> str | None:
        """Returns a sentence that says why no trial can have `count` slots of a host at once; None if one can."""
        return None

    def alike(self, host: Host, count: int) -> Host:
        """Returns the slots that trials of `count` choose from. Any two choices can be compared."""
        return host

    def cores(self, slot: str) -> list[int]:
        """Returns the processor cores that a slot's rank is pinned to; none for no pinning."""
        return []

    def budget(self, host: Host, asked: int | None) -> int | None:
        """Returns the memory limit of a rank, in bytes, by the user's limit for a slot; None for its whole device."""
        return asked

    def identity(self, host: Host) -> dict[str, str]:
        """Returns the names of the devices and the version of their driver, for a later study to compare."""
        return {}

    def asked_often(self) -> AbstractContextManager[object]:
        """Opens what makes repeated questions cheap, for its body."""
        return nullcontext()

    def states(self, host: Host, slots: Sequence[str]) -> list[DeviceState]:
        return [DeviceState(host.device_of(slot)) for slot in slots]

    def tenants(self, host: Host, slots: Sequence[str]) -> dict[str, list[Tenant]]:
        """Returns the processes that compute on each slot's device now, including trials, by the device's name."""
        return {}

    def conditions(self, host: Host) -> list[DeviceCondition]:
        """Returns the properties of each slot's device that may disturb a study; none for a processor."""
        return []

    def load(self, host: Host, slots: Sequence[str]) -> list[dict[str, float]]:
        """Returns the present load of each slot's device: `memory_used` (bytes), `utilization` (percent)."""
        return []


# The memory of the host that this process may still use. Both the machine and the control groups limit it.

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Files:
    """The names of the files that show a control group's memory."""

    limit: str
    used: str
    reclaimable: str
    events: str


# Names from cgroup-v2.rst and cgroup-v1/memory.rst of the kernel's documentation.
_V2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """The bytes that processes here may still take before the kernel kills one; None if the kernel does not show it.

    The kernel keeps files in memory, and can drop them. Such memory counts as free, in the machine and in a control
    group.
    """
    shown = _fields(proc / "meminfo")
    machine = [shown[name] * 1024 for name in ("MemAvailable:", "MemFree:") if name in shown][:1]
    groups = (_left_in(folder, files) for folder, files in _groups(proc, cgroups))
    return min([*machine, *(left for left in groups if left is not None)], default=None)


def kernel_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """A count that grows with each process that the kernel kills because memory has run out; None if it shows none.

    Some containers do not see the machine's counter. Their control groups have counters of their own.
    """
    counters = (proc / "vmstat", *(folder / files.events for folder, files in _groups(proc, cgroups)))
    shown = [_fields(file, beginning="oom_kill").get("oom_kill") for file in counters]
    return None if all(count is None for count in shown) else sum(count or 0 for count in shown)


def has_killed(before: int | None, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> bool | None:
    """Whether `kernel_kills` has grown since it was `before`; None if the kernel does not show it."""
    now = kernel_kills(proc, cgroups)
    return None if now is None or before is None else now > before


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files]]:
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                mount, files = cgroups, _V2
            elif "memory" in controllers.split(","):
                mount, files = cgroups / "memory", _V1
            else:
                continue
            # A container may see the path of the host here, while its own group is mounted at the root.
            own = mount / path.strip("/")
            yield from ((folder, files) for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _left_in(folder: Path, files: _Files) -> int | None:
    # The bytes that a control group may still take; None if it has no limit.
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
        return max(0, limit - used + _fields(folder / "memory.stat").get(files.reclaimable, 0))
    return None


def _fields(path: Path, beginning: str = "") -> dict[str, int]:
    # The numbers in a file with a name and a number on each line; empty if the file is missing.
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if not line.startswith(beginning):
                continue
            with contextlib.suppress(ValueError, IndexError):
                fields[line.split()[0]] = int(line.split()[1])
    return fields


_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory() -> int:
    """Returns the bytes that this process may use: the machine's, or its container's if it has fewer."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        return min(total, int(_CONTAINER_LIMIT.read_text()))
    return total
