"""A host and its devices, and the interface that every kind of host implements."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Host:
    """The devices of this host that trials may use.

    Attributes:
        device: `cuda` or `cpu`.
        slots: the address of each: the index or UUID of a GPU as in CUDA_VISIBLE_DEVICES, or the number of a core.
        memory_per_slot: bytes of one device, 0 if unknown. On a CPU it is the host's memory divided by the slots, less
            a reserve of a tenth.
        devices: the UUID of each slot's GPU, because CUDA_VISIBLE_DEVICES has many spellings for one GPU.
        models: the model of each GPU, by its UUID, if known.
        memory: the bytes of each GPU, by its UUID, if known.
        notes: notes on the choice of devices for the user, a sentence each.
    """

    device: str
    slots: list[str]
    memory_per_slot: int
    devices: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def device_of(self, slot: str) -> str:
        """Returns the name of a slot's device, which is the same for all processes on this host."""
        return self.devices.get(slot, slot)


@dataclass(frozen=True)
class DeviceState:
    """The state of a device at work. Unknown values are None or empty.

    Attributes:
        device: its name, as from `Host.device_of`.
        model: its model.
        clock: of its processors, in MHz.
        power_limit: in W.
        temperature: in degrees Celsius.
        held_down: why its clock is lower than it could be.
        is_idle: whether nothing runs on it. Then its clock means nothing.
    """

    device: str
    model: str = ""
    clock: int | None = None
    power_limit: float | None = None
    temperature: int | None = None
    held_down: tuple[str, ...] = ()
    is_idle: bool = False


@dataclass(frozen=True)
class Tenant:
    """A process that computes on a device.

    Attributes:
        pid: its number for the driver, which may differ from the number in this process's container.
        memory: bytes of the device that it holds; None if unknown.
    """

    pid: int
    memory: int | None = None


@dataclass(frozen=True)
class DeviceCondition:
    """Properties of a device that may disturb a study. Unknown values are None or false.

    Attributes:
        device: its name, as from `Host.device_of`.
        model: its model.
        memory: its bytes.
        memory_used: the bytes in use now, including the driver's.
        is_closed: whether no process may compute on it.
        is_exclusive: whether only one process at a time may compute on it.
        is_cut: whether it is cut into instances, or is one of them.
        forgets: whether the driver unloads its state when it is unused, and loads it again for each trial.
        faults: faults of its memory, in words.
        tenants: the processes that compute on it now.
    """

    device: str
    model: str = ""
    memory: int | None = None
    memory_used: int | None = None
    is_closed: bool = False
    is_exclusive: bool = False
    is_cut: bool = False
    forgets: bool = False
    faults: tuple[str, ...] = ()
    tenants: tuple[Tenant, ...] = ()


class HostKind(Protocol):
    """The differences between a host that trains on its accelerators and one that trains on its processor.

    Attributes:
        device: the name of the devices in torch and DeepSpeed.
        resource: their name in Ray.
        word: their name in `accelerate launch` and torchrun.
        visible_by: the environment variable that chooses the devices of a process; None if there is none.
        ranks_option: the option of the `deepspeed` launcher for their number.
        compiler: the compiler of DeepSpeed's operators for them, beside a C++ compiler; None for none.
        computes_on_the_processor: whether the processor is the device. Then its time measures a step, its memory is the
            slots', and nothing can be offloaded.
    """

    device: str
    resource: str
    word: str
    visible_by: str | None
    ranks_option: str
    compiler: str | None
    computes_on_the_processor: bool

    def environment(self, slots: Sequence[str]) -> dict[str, str]:
        """Returns the variables that show a trial's ranks its slots and nothing else."""

    def primed_with(self, host: Host, count: int) -> dict[str, str]:
        """Returns the variables of a process that imports and builds for trials of `count` slots.

        It sees the devices that a trial sees, because DeepSpeed's operators are built for them. It trains nothing.
        """

    def refusal(self, host: Host, count: int) -> str | None:
        """Returns a sentence that says why no trial can have `count` slots of a host at once; None if one can."""

    def alike(self, host: Host, count: int) -> Host:
        """Returns the slots that trials of `count` choose from. Any two choices can be compared."""

    def cores(self, slot: str) -> list[int]:
        """Returns the processor cores that a slot's rank is pinned to; none for no pinning."""

    def budget(self, host: Host, asked: int | None) -> int | None:
        """Returns the memory limit of a rank, in bytes; None if it may use its whole device.

        Args:
            host: the slots.
            asked: the user's limit for a slot; None if there is none.
        """

    def identity(self, host: Host) -> dict[str, str]:
        """Returns the names of the devices and the version of their driver, for a later study to compare."""

    def asked_often(self) -> AbstractContextManager[object]:
        """Opens what makes repeated questions cheap, for its body."""

    def states(self, host: Host, slots: Sequence[str]) -> list[DeviceState]:
        """Returns the present state of each slot's device."""

    def tenants(self, host: Host, slots: Sequence[str]) -> dict[str, list[Tenant]]:
        """Returns the processes that compute on each slot's device now, including trials, by the device's name.

        On a processor there are none, because every process of a host computes there.
        """

    def conditions(self, host: Host) -> list[DeviceCondition]:
        """Returns the properties of each slot's device that may disturb a study; none for a processor."""

    def load(self, host: Host, slots: Sequence[str]) -> list[dict[str, float]]:
        """Returns the present load of each slot's device: `memory_used` (bytes), `utilization` (percent)."""
