"""What a host has, and what every kind of host answers of its devices."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Host:
    """The devices of this host that trials may use.

    Attributes:
        device: `cuda` or `cpu`.
        slots: what a trial is given to address each: the index or UUID of a GPU as CUDA_VISIBLE_DEVICES spells it, the
            number of a core.
        memory_per_slot: bytes of one device, 0 where nobody knows; on a CPU the host's memory over the slots, less a
            reserve of a tenth.
        devices: the UUID of each slot's GPU: CUDA_VISIBLE_DEVICES may spell one GPU in many ways.
        models: what each of these is, by its UUID, where that is known.
        memory: the bytes of each, by its UUID, where they are known.
        notes: what a person has to know of the choice of devices, a sentence each.
    """

    device: str
    slots: list[str]
    memory_per_slot: int
    devices: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def device_of(self, slot: str) -> str:
        """Returns the name of a slot's device, which is the same for everybody on this host."""
        return self.devices.get(slot, slot)


@dataclass(frozen=True)
class DeviceState:
    """How a device is while it works. What nobody can tell is None, or empty.

    Attributes:
        device: its name, as `Host.device_of` has it.
        model: what it is.
        clock: of what computes, in MHz.
        power_limit: what it may take, in W.
        temperature: in degrees Celsius.
        held_down: why its clock is lower than it could be.
        is_idle: whether nothing runs on it, so that its clock tells nothing.
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
        pid: as the driver numbers it, which need not be as this process's container does.
        memory: bytes of the device that it has; None where nobody may know.
    """

    pid: int
    memory: int | None = None


@dataclass(frozen=True)
class DeviceCondition:
    """What of a device a study may stumble over. What nobody can tell is None, or false.

    Attributes:
        device: its name, as `Host.device_of` has it.
        model: what it is.
        memory: its bytes.
        memory_used: those that somebody has now, the driver included.
        is_closed: whether it is set to let nobody compute.
        is_exclusive: whether it lets one process compute at a time.
        is_cut: whether it is cut into instances, or one of these.
        forgets: whether the driver lets go of it when nobody uses it, and takes it up anew for each trial.
        faults: what is wrong with its memory, in words.
        tenants: who computes on it now.
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
    """What differs between a host that trains on its accelerators and one that trains on its processor.

    Attributes:
        device: what torch and DeepSpeed call the devices.
        resource: what Ray calls them.
        word: what `accelerate launch` and torchrun call them.
        visible_by: the environment variable that says which of them a process sees; None where nothing does.
        ranks_option: by which option the `deepspeed` launcher is told how many to use.
        compiler: what builds DeepSpeed's ops for them beside a C++ compiler; None for nothing.
        computes_on_the_processor: whether the processor is the device: its time tells how long a step took, its memory
            is the slots', and there is nothing to offload to.
    """

    device: str
    resource: str
    word: str
    visible_by: str | None
    ranks_option: str
    compiler: str | None
    computes_on_the_processor: bool

    def environment(self, slots: Sequence[str]) -> dict[str, str]:
        """Returns the variables by which a trial's ranks are shown its slots and nothing else."""

    def primed_with(self, host: Host, count: int) -> dict[str, str]:
        """Returns the variables of a process that imports and builds for trials of `count` slots, and trains nothing.

        It is shown what a trial is shown: DeepSpeed's ops are built for the devices that are there.
        """

    def refusal(self, host: Host, count: int) -> str | None:
        """Returns in a sentence why no trial can have `count` slots of a host at once; None where one can."""

    def alike(self, host: Host, count: int) -> Host:
        """Returns the slots that trials of `count` are to choose from, so that any two of them can be compared."""

    def cores(self, slot: str) -> list[int]:
        """Returns the processor cores that the rank of a slot is pinned to; none for no pinning."""

    def budget(self, host: Host, asked: int | None) -> int | None:
        """Returns the bytes of memory that a rank is held to; None where that is all its device has.

        Args:
            host: the slots.
            asked: what the user grants a slot; None where nobody said.
        """

    def identity(self, host: Host) -> dict[str, str]:
        """Returns what a later study would miss if it were replaced: the devices' names and their driver's version."""

    def asked_often(self) -> AbstractContextManager[object]:
        """Returns within what it costs little to ask again and again."""

    def states(self, host: Host, slots: Sequence[str]) -> list[DeviceState]:
        """Returns how each slot's device is now."""

    def tenants(self, host: Host, slots: Sequence[str]) -> dict[str, list[Tenant]]:
        """Returns which processes compute on each slot's device now, trials included, by the device's name.

        Nothing on a processor: whatever runs on a host computes there.
        """

    def conditions(self, host: Host) -> list[DeviceCondition]:
        """Returns what of each slot's device a study may stumble over; nothing of a processor."""

    def load(self, host: Host, slots: Sequence[str]) -> list[dict[str, float]]:
        """Returns what each slot's device is busy with now: `memory_used` (bytes), `utilization` (percent)."""
