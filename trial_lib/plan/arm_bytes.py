"""The memory model's prior from foreseen runs: the bytes of an arm's moments, and their growth with the micro-batch."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun, MemoryEvent
from zerotune.trial_lib.plan.device_memory import live_bytes, rounded
from zerotune.trial_lib.plan.scaling import have_same_events, scaled_run, storages_of_pairs
from zerotune.trial_lib.search.allocations import ForeseenArm, SizeLine

# A model of the C library's heap, for runs whose device is a processor.

_HEADER, _UNIT, _SMALLEST = 8, 16, 32
_ALIGNMENT, _PAGE = 64, 4096
MAPPED_FROM = (32 << 20) - (64 << 10)
"""Bytes. A rank's heap has this threshold from its first step on (`keep_what_is_freed` in `device/rank/cpu.py`)."""


class CHeap:
    def __init__(self) -> None:
        # Free pieces by size and start, with both ends to join neighbours.
        self._free: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._top = self._mapped = 0
        # Of each handle: start and size. Mapped blocks have no start.
        self._used: dict[int, tuple[int | None, int]] = {}

    @property
    def held(self) -> int:
        """Bytes from its begin to the end of its last block, with all holes, and those of mapped blocks."""
        return self._top + self._mapped

    def allocate(self, handle: int, request: int) -> None:
        size = max(_SMALLEST, -(-(request + _HEADER) // _UNIT) * _UNIT)
        if size >= MAPPED_FROM:
            pages = -(-(size + _ALIGNMENT + _SMALLEST) // _PAGE) * _PAGE
            self._used[handle] = None, pages
            self._mapped += pages
        else:
            self._used[handle] = self._cut(size)

    def free(self, handle: int) -> None:
        """An unknown handle is ignored."""
        start, size = self._used.pop(handle, (None, 0))
        if start is None:
            self._mapped -= size
        else:
            self._release(start, size)

    def _cut(self, size: int) -> tuple[int, int]:
        # Start and size of a block, with the rest in front of it, which is freed with it.
        start, found = self._take(size + _ALIGNMENT + _SMALLEST)
        # The header lies in front of the aligned address.
        front = -(start + _UNIT) % _ALIGNMENT
        if 0 < front < _SMALLEST:
            front += _ALIGNMENT
        end, block = start + found, start + front + size
        if end - block < _SMALLEST:
            block = end
        else:
            self._release(block, end - block)
        return start, block - start

    def _take(self, size: int) -> tuple[int, int]:
        place = bisect_left(self._free, (size, 0))
        if place == len(self._free):
            self._top += size
            return self._top - size, size
        found, start = self._free[place]
        self._remove(start)
        if found - size < _SMALLEST:
            return start, found
        self._add(start + size, found - size)
        return start, size

    def _release(self, start: int, size: int) -> None:
        end = start + size
        if end in self._sizes:
            end += self._remove(end)
        if start in self._starts:
            start = self._starts[start]
            self._remove(start)
        if end == self._top:
            self._top = start
        else:
            self._add(start, end - start)

    def _add(self, start: int, size: int) -> None:
        insort(self._free, (size, start))
        self._sizes[start] = size
        self._starts[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._free[bisect_left(self._free, (size, start))]
        return size


# Host memory of a rank, from a foreseen run: offloaded states in pageable and in pinned memory, and its data.


@dataclass(frozen=True, kw_only=True)
class HostPeak:
    pageable: float  # the most live bytes in pageable memory during the steps
    built: float  # the most while the program builds its model, which may be on the host
    pinned: float  # the most live bytes in pinned memory, each block a power of two
    pinned_blocks: float  # all blocks that torch has pinned. It keeps a freed one for the next request of its size.
    data: float  # of the program's data, which are real

    @property
    def held(self) -> float:
        """All that stays in the host for the rank's steps, beside the interpreter and its libraries."""
        return self.pageable + self.pinned_blocks + self.data


def host_peak(run: ForeseenRun) -> HostPeak:
    highest = live_bytes(run, "host").by_name()
    return HostPeak(
        pageable=max((peak for name, peak in highest.items() if name != "initialize"), default=0.0),
        built=highest.get("initialize", 0.0),
        pinned=live_bytes(run, "pinned").peak,
        pinned_blocks=_pinned_blocks(run),
        data=run.data_bytes,
    )


def _pinned_blocks(run: ForeseenRun) -> float:
    """The bytes of all pinned blocks, by size the most that are live at once.

    Source: `aten/src/ATen/core/CachingHostAllocator.h` of PyTorch 2.13, which keeps free blocks in one list for each
    power of two and gives none back.
    """
    index = PLACES.index("pinned")
    live: Counter[float] = Counter()
    most: Counter[float] = Counter()
    for storage, is_made in run.events:
        if run.storages[storage].place != index:
            continue
        size = rounded(run.storages[storage].size, "pinned")
        live[size] += 1 if is_made else -1
        most[size] = max(most[size], live[size])
    return sum(size * count for size, count in most.items())


_DEVICE, _THREAD = PLACES.index("device"), PLACES.index("thread")
# The line is near these multiples of the larger size. On a GPU a point is exact, and at small sizes the peak may be at
# an event whose bytes hardly grow. In a processor's heap the holes differ from size to size, and a slot holds less.
_SHARES = {"cuda": (4, 8), "cpu": (0.5, 1, 2, 4)}
# Uses of memory that a sample takes. Temporaries count as well in part, which no kind says.
_OF_SAMPLES = frozenset(KINDS.index(kind) for kind in ("activation", "input"))
_INITIALIZE, _UPDATE = MOMENTS.index("initialize"), MOMENTS.index("update")


@dataclass(frozen=True)
class _Level:
    """A peak above initialisation: its bytes, and those of activations and batches, and of pairs of samples."""

    bytes_: float = 0.0
    of_samples: float = 0.0
    of_pairs: float = 0.0


@dataclass(frozen=True)
class _Levels:
    initialize: float  # live when `deepspeed.initialize` returns
    backward: _Level  # the peak outside the optimizer's step
    update: _Level  # the peak in the optimizer's step


def foreseen_arm(runs: Sequence[ForeseenRun], device: str) -> ForeseenArm | None:
    """The bytes of an arm at one micro-batch size or more; None if no run has foreseen a step.

    The smallest and the largest run count. If they have the same events, the line goes through larger sizes than
    theirs. At a small size another event may have the peak, whose bytes hardly grow. If all runs have one size,
    activations and batches are taken as growing. A processor has one memory, in which offloaded states and data sets
    lie too.
    """
    whole = sorted(
        (run for run in runs if not run.stopped and any(moment.name == _UPDATE for moment in run.moments)),
        key=lambda run: run.micro_batch,
    )
    if not whole:
        return None
    small, large = whole[0], whole[-1]
    sized = {run.micro_batch: run for run in (small, large)}
    pairs: frozenset[int] = frozenset()
    if small.micro_batch < large.micro_batch and have_same_events(small, large):
        pairs = storages_of_pairs(small, large)
        sizes = {round(share * large.micro_batch) for share in _SHARES[device]}
        sized = {size: scaled_run(small, larger=large, micro_batch=size) for size in sorted(sizes)}
    levels = {size: _levels(run, device, pairs) for size, run in sized.items()}
    return ForeseenArm(
        ds_config=large.ds_config,
        initialize=SizeLine(levels[max(levels)].initialize),
        backward=_line({size: each.backward for size, each in levels.items()}),
        update=_line({size: each.update for size, each in levels.items()}),
        host=0.0 if device == "cpu" else host_peak(large).held,
    )


def _line(levels: Mapping[int, _Level]) -> SizeLine:
    if len(levels) > 1:
        largest = max(levels)
        per_pair = levels[largest].of_pairs / max(1, largest) ** 2
        return SizeLine.near({size: level.bytes_ for size, level in levels.items()}, per_pair)
    ((size, level),) = levels.items()
    return SizeLine(level.bytes_ - level.of_samples, level.of_samples / max(1, size))


def _levels(run: ForeseenRun, device: str, pairs: Collection[int]) -> _Levels:
    # A processor has one memory, in which all lies. Its heap has holes. On a GPU the heap stays empty.
    heap, live, of_samples, of_pairs, threads = CHeap(), 0.0, 0.0, 0.0, 0
    initialize, held_then = 0.0, 0
    data = run.data_bytes if device == "cpu" else 0
    most = {"backward": _Level(), "update": _Level()}
    for part, events in _parts(run):
        peak, then, held = live, (of_samples, of_pairs), 0
        for storage, is_made in events:
            size, kind, place, _ = run.storages[storage]
            if device != "cpu":
                if place != _DEVICE:
                    continue
                size = int(rounded(size, "device"))
            elif place == _THREAD:
                threads = max(threads, size)
            elif is_made:
                heap.allocate(storage, size)
            else:
                heap.free(storage)
            change = size if is_made else -size
            live += change
            of_samples += change if kind in _OF_SAMPLES else 0
            of_pairs += change if storage in pairs else 0
            if live > peak:
                peak, then = live, (of_samples, of_pairs)
            held = max(held, heap.held)
        if part == "initialize":
            initialize, held_then = live, heap.held
            continue
        # An update takes few large blocks, and those that the passes have freed.
        with_holes = held - held_then + threads if part == "backward" else 0
        above = max(peak - initialize, with_holes) + data
        if above > most[part].bytes_:
            most[part] = _Level(above, *then)
    return _Levels(initialize, most["backward"], most["update"])


def _parts(run: ForeseenRun) -> Iterator[tuple[str, Sequence[MemoryEvent]]]:
    last = max((place for place, moment in enumerate(run.moments) if moment.name == _INITIALIZE), default=-1)
    for place, (moment, events) in enumerate(run.events_by_moment()):
        part = "initialize" if place <= last else "update" if moment.name == _UPDATE else "backward"
        yield part, run.events[events.start : events.stop]
