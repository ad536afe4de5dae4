"""The memory that a run reserves: its allocations replayed through the caching allocator."""

from collections.abc import Sequence
from dataclasses import dataclass

from trial_lib.foresee.memory.allocator_settings import AllocatorSettings
from trial_lib.foresee.memory.caching_allocator import CachingAllocator
from trial_lib.wire.foreseen_run import MOMENTS, PLACES, ForeseenRun


@dataclass(frozen=True, kw_only=True)
class MomentReserved:
    """Bytes during one moment.

    Attributes:
        name: one of `MOMENTS`.
        step: the optimizer step, from 1.
        micro_batch: of the step, from 0.
        allocated: the most bytes in use.
        reserved: the most bytes of all segments.
    """

    name: str
    step: int
    micro_batch: int
    allocated: float
    reserved: float


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """What the caching allocator makes of a run's allocations.

    Attributes:
        allocated: the most bytes in use, `torch.cuda.max_memory_allocated`.
        reserved: the most bytes of all segments, `torch.cuda.max_memory_reserved`.
        in_use_then: bytes in use when the most are reserved.
        segments: when the most bytes are reserved.
        retries: how often the allocator emptied its cache because the device was full.
        failed_at: index of the event whose request found no room; None if all did. The replay ends there.
        lacking: bytes of that request; 0 if there is none.
        moments: of the run, in order.
    """

    allocated: float
    reserved: float
    in_use_then: float
    segments: int
    retries: int
    failed_at: int | None
    lacking: float
    moments: tuple[MomentReserved, ...]

    @property
    def fragmentation(self) -> float:
        """The share of the reserved memory that is not in use when the most is reserved."""
        return 1 - self.in_use_then / self.reserved if self.reserved else 0.0


def replay(
    run: ForeseenRun,
    settings: AllocatorSettings | None = None,
    limit: float | None = None,
    before: Sequence[float] = (),
) -> Reserved:
    """Replays the allocations of a run on its device.

    Args:
        run: the foreseen run.
        settings: of the allocator.
        limit: bytes that the device has for PyTorch; None for no limit.
        before: bytes of blocks that are in use during the whole run and are not in its log, such as workspaces.
    """
    allocator = CachingAllocator(settings, limit)
    device = PLACES.index("device")
    most, lacking = _Most(), 0.0
    failed_at = None
    for index, size in enumerate(before):
        if not allocator.allocate(-1 - index, size):
            failed_at, lacking = 0, size
    most.see(allocator)
    storages, events = run.storages, run.events
    moments: list[MomentReserved] = []
    for moment, its_events in run.events_by_moment():
        here = _Most()
        here.see(allocator)
        for event in its_events if failed_at is None else ():
            index, is_made = events[event]
            storage = storages[index]
            if storage.place != device:
                continue
            if not is_made:
                allocator.free(index)
                continue
            if not allocator.allocate(index, storage.size, storage.stream):
                failed_at, lacking = event, storage.size
                break
            here.see(allocator)
        most.take(here)
        moments.append(
            MomentReserved(
                name=MOMENTS[moment.name],
                step=moment.step,
                micro_batch=moment.micro_batch,
                allocated=here.allocated,
                reserved=here.reserved,
            )
        )
        if failed_at is not None:
            break
    return Reserved(
        allocated=most.allocated,
        reserved=most.reserved,
        in_use_then=most.in_use_then,
        segments=most.segments,
        retries=allocator.retries,
        failed_at=failed_at,
        lacking=lacking,
        moments=tuple(moments),
    )


def least_reserved(
    run: ForeseenRun,
    found: Reserved,
    settings: AllocatorSettings | None = None,
    before: Sequence[float] = (),
    tries: int = 3,
) -> float:
    """Returns about the least bytes that a device has to have for PyTorch, so that every request finds room.

    A full device makes the allocator give back whole segments that are free, so this is below what an endless device
    reserves. It is the middle between the sizes of a replay that failed and of one that did not.

    Args:
        run: the foreseen run.
        found: its replay on a device without a limit.
        settings: of the allocator.
        before: as in `replay`.
        tries: replays. Each halves the error, which begins as the whole of the reserved memory that is not in use.
    """
    too_small, enough = found.allocated, found.reserved
    for _ in range(tries):
        middle = (too_small + enough) / 2
        if replay(run, settings, middle, before).failed_at is None:
            enough = middle
        else:
            too_small = middle
    return (too_small + enough) / 2


@dataclass
class _Most:
    """The most bytes that were seen."""

    allocated: float = 0
    reserved: float = 0
    in_use_then: float = 0
    segments: int = 0

    def see(self, allocator: CachingAllocator) -> None:
        allocated, reserved = allocator.allocated, allocator.reserved
        if allocated > self.allocated:
            self.allocated = allocated
        if reserved > self.reserved or (reserved == self.reserved and allocated > self.in_use_then):
            self.reserved, self.in_use_then, self.segments = reserved, allocated, allocator.segments

    def take(self, later: "_Most") -> None:
        """Takes the most of a later stretch, if it is more."""
        self.allocated = max(self.allocated, later.allocated)
        if (later.reserved, later.in_use_then) > (self.reserved, self.in_use_then):
            self.reserved, self.in_use_then, self.segments = later.reserved, later.in_use_then, later.segments
