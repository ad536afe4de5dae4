"""Live bytes over the events of a foreseen run: the peak of each moment, its split by use, and a step's time line.

A storage counts from its allocation to its release, with the size that PyTorch's allocator gives it (`rounded`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from trial_lib.messages.foreseen_run import KINDS, MOMENTS, OPERATIONS, PLACES, ForeseenRun
from trial_lib.plan.allocator import AllocatorSettings, CachingAllocator, rounded

_LOSS, _ON_DEVICE = OPERATIONS.index("loss"), PLACES.index("device")
_MAY_BE = [KINDS.index(kind) for kind in ("activation", "temporary", "gradient")]
# An operation of the loss reads logits and writes as much, in one precision or the other. So logits are between a
# quarter and the whole of what the largest such operation moves, and nothing else of a model is nearly as large.
_LEAST_LOGITS, _MOST_LOGITS = 0.2, 1.05


@dataclass(frozen=True, kw_only=True)
class MomentPeak:
    name: str  # one of `MOMENTS`
    step: int  # the optimizer step, from 1; 0 before the first
    micro_batch: int  # of the step, from 0
    peak: float  # bytes
    by_kind: tuple[float, ...]  # bytes at that peak, in the order of `KINDS`
    at_begin: float  # live bytes when the moment begins
    at_end: float  # live bytes when it ends
    event: int  # index of the event that reaches the peak; the moment's first event if it begins at its peak

    @property
    def split(self) -> dict[str, float]:
        return {kind: size for kind, size in zip(KINDS, self.by_kind, strict=True) if size}


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    place: str  # one of `PLACES`
    moments: tuple[MomentPeak, ...]  # of the run, in order

    @property
    def highest(self) -> MomentPeak | None:
        """The moment with the peak of the run; None if the run has no moments."""
        return max(self.moments, key=lambda moment: moment.peak, default=None)

    @property
    def peak(self) -> float:
        return self.highest.peak if self.highest else 0.0

    def highest_of(self, name: str) -> MomentPeak | None:
        return max((each for each in self.moments if each.name == name), key=lambda each: each.peak, default=None)

    def by_name(self) -> dict[str, float]:
        """The peak of each name of a moment, in bytes, for the names that the run has."""
        highest = {name: self.highest_of(name) for name in MOMENTS}
        return {name: moment.peak for name, moment in highest.items() if moment}


def live_bytes(run: ForeseenRun, place: str = "device") -> LiveBytes:
    live = [0.0] * len(KINDS)
    total, found, steps = 0.0, [], _changes(run, place)
    for moment, events in run.events_by_moment():
        at_begin = peak = total
        at_peak, where = tuple(live), moment.event
        for event in events:
            kind, change = steps[event]
            live[kind] += change
            total += change
            if total > peak:
                peak, at_peak, where = total, tuple(live), event
        found.append(
            MomentPeak(
                name=MOMENTS[moment.name],
                step=moment.step,
                micro_batch=moment.micro_batch,
                peak=peak,
                by_kind=at_peak,
                at_begin=at_begin,
                at_end=total,
                event=where,
            )
        )
    return LiveBytes(place=place, moments=tuple(found))


def _changes(run: ForeseenRun, place: str) -> list[tuple[int, float]]:
    # The kind and the change of live bytes of each event; a change of 0 if it is in another place.
    index = PLACES.index(place)
    sizes = [rounded(storage.size, place) if storage.place == index else 0 for storage in run.storages]
    return [
        (run.storages[event.storage].kind, float(sizes[event.storage] if event.is_made else -sizes[event.storage]))
        for event in run.events
    ]


def with_logits(peak: MomentPeak, run: ForeseenRun, micro_batch: int) -> dict[str, float]:
    """The bytes of a peak by kind, with `logits` as a kind of its own: they can be most of the memory.

    The run has the events that the peak refers to, at any micro-batch.
    """
    split = dict(zip(KINDS, peak.by_kind, strict=True))
    moved = max((each.moved for each in run.operations if each.kind == _LOSS), default=0.0)
    if moved <= 0:
        return {kind: size for kind, size in split.items() if size > 0}
    live: set[int] = set()
    for event in run.events[: peak.event + 1]:
        if event.is_made:
            live.add(event.storage)
        else:
            live.discard(event.storage)
    split["logits"] = 0.0
    for storage in (run.storages[index] for index in live):
        if (
            storage.place == _ON_DEVICE
            and storage.kind in _MAY_BE
            and _LEAST_LOGITS * moved <= storage.size <= _MOST_LOGITS * moved
        ):
            kind = KINDS[storage.kind]
            size = min(split[kind], rounded(storage.size, "device") * micro_batch / max(1, run.micro_batch))
            split[kind] -= size
            split["logits"] += size
    return {kind: size for kind, size in split.items() if size > 0}


# The memory that a run reserves: its allocations replayed through the caching allocator.


@dataclass(frozen=True)
class Reserved:
    allocated: float  # the most bytes in use, `torch.cuda.max_memory_allocated`
    reserved: float  # the most bytes of all segments, `torch.cuda.max_memory_reserved`
    failed_at: int | None  # index of the event whose request found no room; None if all did. The replay ends there.


def replay(
    run: ForeseenRun,
    settings: AllocatorSettings | None = None,
    limit: float | None = None,
    before: Sequence[float] = (),
) -> Reserved:
    """Replays the allocations of a run on its device, which has `limit` bytes for PyTorch.

    `before` has the bytes of blocks that are in use during the whole run and are not in its log, such as workspaces.
    """
    allocator = CachingAllocator(settings, limit)
    failed_at = None
    for index, size in enumerate(before):
        if not allocator.allocate(-1 - index, size):
            failed_at = 0
    allocated, reserved = allocator.allocated, allocator.reserved
    events = chain.from_iterable(events for _, events in run.events_by_moment())
    for event in events if failed_at is None else ():
        index, is_made = run.events[event]
        storage = run.storages[index]
        if storage.place != _ON_DEVICE:
            continue
        if not is_made:
            allocator.free(index)
        elif allocator.allocate(index, storage.size, storage.stream):
            allocated, reserved = max(allocated, allocator.allocated), max(reserved, allocator.reserved)
        else:
            failed_at = event
            break
    return Reserved(allocated, reserved, failed_at)


def least_reserved(
    run: ForeseenRun,
    found: Reserved,
    settings: AllocatorSettings | None = None,
    before: Sequence[float] = (),
    tries: int = 3,
) -> float:
    """About the least bytes that a device has to have for PyTorch, so that every request finds room.

    A full device makes the allocator give back whole segments that are free, so this is below what an endless device
    reserves (`found`). It is the middle between the sizes of a replay that failed and of one that did not. Each of the
    `tries` halves the error, which begins as the whole of the reserved memory that is not in use.
    """
    too_small, enough = found.allocated, found.reserved
    for _ in range(tries):
        middle = (too_small + enough) / 2
        if replay(run, settings, middle, before).failed_at is None:
            enough = middle
        else:
            too_small = middle
    return (too_small + enough) / 2
