"""The memory of a device in a simulated run: PyTorch's caching allocator, live bytes, and a replay of allocations."""

import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, OPERATIONS, PLACES, ForeseenRun

SMALLEST_BLOCK = 512
"""Bytes. Every block on a device is a multiple of it (`kMinBlockSize`)."""


def rounded(size: float, place: str) -> float:
    """The bytes that a request takes in one of `PLACES`. Plain host memory is not rounded."""
    if size <= 0:
        return 0
    if place == "pinned":
        return 1 << (int(size) - 1).bit_length()
    if place == "device":
        return -(-int(size) // SMALLEST_BLOCK) * SMALLEST_BLOCK
    return size


# The settings, as `PYTORCH_CUDA_ALLOC_CONF` gives them.

_MIB = 2**20
# The first that is set counts (`c10/core/AllocatorConfig.h`). The second is the older name.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# A value may be a list in brackets, whose commas separate nothing.
_PAIR = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,]*)\s*(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    expandable_segments: bool = False  # whether segments grow instead of having the size of a request
    max_split_size: int | None = None  # bytes of the largest block that may be split; None if all may be
    max_non_split_rounding: int = 20 * _MIB  # bytes that a block which may not be split can be larger than a request
    # Steps between two powers of two to which requests are rounded, by the power of two (in MiB) from which they hold.
    # Empty if requests are rounded to 512 bytes.
    roundup_power2_divisions: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "AllocatorSettings":
        """Raises InputError if a value cannot be read."""
        variable = next((name for name in _VARIABLES if environment.get(name)), _VARIABLES[0])
        return cls.parse(environment.get(variable, ""))

    @classmethod
    def parse(cls, text: str) -> "AllocatorSettings":
        """Keys that do not change sizes are ignored. Raises InputError if a value cannot be read."""
        found: dict[str, str] = {match[1]: match[2] for match in _PAIR.finditer(text)}
        split, rounding = found.get("max_split_size_mb"), found.get("max_non_split_rounding_mb")
        return cls(
            expandable_segments=found.get("expandable_segments", "").strip().lower() == "true",
            max_split_size=None if split is None else _number(split, "max_split_size_mb") * _MIB,
            max_non_split_rounding=20 * _MIB
            if rounding is None
            else _number(rounding, "max_non_split_rounding_mb") * _MIB,
            roundup_power2_divisions=_divisions(found.get("roundup_power2_divisions", "")),
        )

    def rounded(self, request: int) -> int:
        """The bytes of the block for a request (`round_size`)."""
        if request < SMALLEST_BLOCK:
            return SMALLEST_BLOCK
        steps = self._divisions_at(request)
        if steps > 1 and request > SMALLEST_BLOCK * steps:
            return _next_division(request, steps)
        return -(-request // SMALLEST_BLOCK) * SMALLEST_BLOCK

    def _divisions_at(self, request: int) -> int:
        steps = 0
        for begin, value in self.roundup_power2_divisions:
            if request >= begin * _MIB or not steps:
                steps = value
        return steps


def _next_division(request: int, steps: int) -> int:
    floor = 1 << (request.bit_length() - 1)
    if request == floor:
        return request
    division = floor >> (steps.bit_length() - 1)
    return floor << 1 if division == 0 else -(-request // division) * division


def _divisions(text: str) -> tuple[tuple[int, int], ...]:
    text = text.strip()
    if not text:
        return ()
    if not text.startswith("["):
        return ((0, _number(text, "roundup_power2_divisions")),)
    pairs = [pair.partition(":") for pair in text.strip("[]").split(",") if pair.strip()]
    listed = [(begin.strip(), _number(steps, "roundup_power2_divisions")) for begin, _, steps in pairs]
    known = sorted((_number(begin, "roundup_power2_divisions"), steps) for begin, steps in listed if begin != ">")
    others = [(2 * known[-1][0] if known else 0, steps) for begin, steps in listed if begin == ">"]
    return (*known, *others)


def _number(text: str, key: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{key}:{text.strip()} is not a whole number.", where=" or ".join(_VARIABLES), remedy="Write one."
        ) from None


# The model of the allocator for CUDA (`c10/cuda/CUDACachingAllocator.cpp`).

SMALL_REQUEST, SMALL_SEGMENT, LARGE_SEGMENT = _MIB, 2 * _MIB, 20 * _MIB
# A request of this size or more gets a segment of its own, in whole units.
OWN_SEGMENT, SEGMENT_UNIT = 10 * _MIB, 2 * _MIB
SMALLEST_REST = 512
# The addresses of a range that grows, in whole pages. Otherwise only their order matters.
_RANGE = LARGE_SEGMENT * 2**26


@dataclass(eq=False, slots=True)
class _Block:
    """A stretch of a segment. `before` and `after` are its neighbours there."""

    start: int
    size: int
    is_free: bool = False
    is_mapped: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None

    @property
    def is_split(self) -> bool:
        return self.before is not None or self.after is not None

    @property
    def grown_size(self) -> int:
        """Its size with the unmapped pages behind it."""
        return self.size + (self.after.size if self.after is not None and not self.after.is_mapped else 0)


@dataclass(eq=False)
class _Pool:
    """The free blocks of one pool, by size and address, and the unmapped ones by address."""

    is_small: bool
    number: int = 0
    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    unmapped: dict[int, _Block] = field(default_factory=dict)

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.is_small else LARGE_SEGMENT

    def add(self, block: _Block) -> None:
        block.is_free = True
        insort(self.keys, (block.size, block.start))
        self.blocks[block.start] = block

    def remove(self, block: _Block) -> None:
        del self.keys[bisect_left(self.keys, (block.size, block.start))]
        del self.blocks[block.start]
        block.is_free = False

    def smallest(self, size: int) -> _Block | None:
        """The best fit. A block that can grow counts with the size to which it can."""
        place = bisect_left(self.keys, (size, 0))
        if place == len(self.keys):
            return None
        best = self.blocks[self.keys[place][1]]
        if not self.unmapped:
            # No block can grow.
            return best
        for following in range(place + 1, len(self.keys)):
            block = self.blocks[self.keys[following][1]]
            if block.grown_size >= best.grown_size:
                break
            best = block
        return best


class CachingAllocator:
    """The allocator of one device. It may reserve `limit` bytes; None for a device without an end."""

    def __init__(self, settings: AllocatorSettings | None = None, limit: float | None = None) -> None:
        self._settings = settings or AllocatorSettings()
        self._limit = float("inf") if limit is None else limit
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._in_use: dict[int, tuple[_Block, _Pool]] = {}
        self._next_address = 0
        self._most_split = self._settings.max_split_size or float("inf")
        self.allocated = 0  # bytes in blocks that are in use
        self.reserved = 0  # bytes of all segments
        self.retries = 0  # how often it gave cached segments back to the device, because the device was full

    def allocate(self, handle: int, request: float, stream: int = 0) -> bool:
        """Returns False if the device is full even without cached segments. 0 bytes take no memory."""
        if request <= 0:
            return True
        size = self._settings.rounded(int(request))
        key = stream, size <= SMALL_REQUEST
        if key not in self._pools:
            self._pools[key] = _Pool(is_small=key[1], number=len(self._pools))
        pool = self._pools[key]
        block = self._cached(pool, size) or self._from_device(pool, size)
        if block is None:
            return False
        self._split(pool, block, size)
        self._in_use[handle] = block, pool
        self.allocated += block.size
        return True

    def free(self, handle: int) -> None:
        """An unknown handle is ignored."""
        block, pool = self._in_use.pop(handle, (None, None))
        if block is None or pool is None:
            return
        self.allocated -= block.size
        self._merge_free(pool, block)
        pool.add(block)

    def release_cached(self) -> None:
        """Gives all free segments back to the device (`torch.cuda.empty_cache`)."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if self._settings.expandable_segments:
                    self._unmap(pool, block)
                elif not block.is_split:
                    self._release(pool, block)

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        block = pool.smallest(size)
        if block is None or size < self._most_split <= block.size:
            return None
        if size >= self._most_split and block.size >= size + self._settings.max_non_split_rounding:
            return None
        pool.remove(block)
        return block

    def _from_device(self, pool: _Pool, size: int) -> _Block | None:
        block = self._new(pool, size)
        if block is None and self._settings.max_split_size and self._release_oversize(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._new(pool, size)
        return block

    def _new(self, pool: _Pool, size: int) -> _Block | None:
        return self._grown(pool, size) if self._settings.expandable_segments else self._segment(pool, size)

    def _segment(self, pool: _Pool, size: int) -> _Block | None:
        taken = _segment_size(size)
        if self.reserved + taken > self._limit:
            return None
        block = _Block(self._next_address, taken)
        self._next_address += taken
        self.reserved += taken
        return block

    def _grown(self, pool: _Pool, size: int) -> _Block | None:
        # Maps pages at the lowest address that has room (`try_allocate_expandable_block`).
        block = self._room(pool, size)
        if not block.is_mapped and not self._map(pool, block, min(size, block.size)):
            return None
        while block.size < size:
            following = block.after
            if following is None or not self._map(pool, following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _room(self, pool: _Pool, size: int) -> _Block:
        for _, unmapped in sorted(pool.unmapped.items()):
            first = unmapped.before if unmapped.before is not None and unmapped.before.is_free else unmapped
            room = 0
            block: _Block | None = first
            while block is not None and room < size and (block.is_free or not block.is_mapped):
                room += block.size
                block = block.after
            if room >= size:
                return first
        whole = _Block((1 + pool.number) * _RANGE, _RANGE, is_mapped=False)
        pool.unmapped[whole.start] = whole
        return whole

    def _map(self, pool: _Pool, block: _Block, size: int) -> bool:
        mapped = -(-size // pool.page) * pool.page
        if self.reserved + mapped > self._limit:
            return False
        self.reserved += mapped
        del pool.unmapped[block.start]
        block.is_mapped = True
        if mapped < block.size:
            rest = _Block(block.start + mapped, block.size - mapped, is_mapped=False)
            self._cut(block, mapped, rest)
            pool.unmapped[rest.start] = rest
        self._merge_free(pool, block)
        pool.add(block)
        return True

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        # Gives the whole pages of a free block back; a rest at either end stays free.
        begin = -(-block.start // pool.page) * pool.page
        given = (block.start + block.size - begin) // pool.page * pool.page
        if given <= 0:
            return
        pool.remove(block)
        self.reserved -= given
        if begin > block.start:
            pages = _Block(begin, block.start + block.size - begin)
            self._cut(block, begin - block.start, pages)
            pool.add(block)
            block = pages
        if block.size > given:
            rest = _Block(block.start + given, block.size - given)
            self._cut(block, given, rest)
            pool.add(rest)
        block.is_mapped = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.is_mapped:
                del pool.unmapped[neighbour.start]
                self._merge(block, neighbour)
        pool.unmapped[block.start] = block

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        rest = block.size - size
        if pool.is_small or self._settings.expandable_segments:
            if rest < SMALLEST_REST:
                return
        elif not (size < self._most_split and rest > SMALL_REQUEST):
            return
        remaining = _Block(block.start + size, rest)
        self._cut(block, size, remaining)
        pool.add(remaining)

    @staticmethod
    def _cut(block: _Block, size: int, rest: _Block) -> None:
        # Shortens a block to a size. The rest becomes its neighbour.
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size

    def _merge_free(self, pool: _Pool, block: _Block) -> None:
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                pool.remove(neighbour)
                self._merge(block, neighbour)

    @staticmethod
    def _merge(block: _Block, gone: _Block) -> None:
        if gone is block.before:
            block.start, block.before = gone.start, gone.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = gone.after
            if block.after is not None:
                block.after.before = block
        block.size += gone.size

    def _release(self, pool: _Pool, block: _Block) -> None:
        pool.remove(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        # Gives back blocks that may not be split, until they are enough for a request.
        needed = max(size, int(self._most_split))
        one = pool.smallest(needed)
        if one is not None and not one.is_split:
            self._release(pool, one)
            return True
        released = 0
        while released < needed and pool.keys and pool.keys[-1][0] >= self._most_split:
            largest = pool.blocks[pool.keys[-1][1]]
            if largest.is_split:
                break
            released += largest.size
            self._release(pool, largest)
        return released >= needed


def _segment_size(size: int) -> int:
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_UNIT) * SEGMENT_UNIT


# Live bytes over the events of a run: the peak of each moment, and its split by use. A storage counts from its
# allocation to its release, with the size that the allocator gives it (`rounded`).

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
