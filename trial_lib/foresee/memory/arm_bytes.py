"""The memory model's prior from foreseen runs: the bytes of an arm's moments, and their growth with the micro-batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from trial_lib.foresee.memory.offloaded import host_peak
from trial_lib.foresee.memory.rounding import rounded
from trial_lib.foresee.memory.scaled_run import have_same_events, scaled_run
from trial_lib.memory.c_heap import CHeap
from trial_lib.memory.foreseen_bytes import ForeseenArm, SizeLine
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun, MemoryEvent

_DEVICE, _THREAD = PLACES.index("device"), PLACES.index("thread")
# The line is near these multiples of the larger size. On a GPU a point is exact, and at small sizes the peak may be at
# an event whose bytes hardly grow. In a processor's heap the holes differ from size to size, and a slot holds less.
_SHARES = {"cuda": (4, 8), "cpu": (0.5, 1, 2, 4)}
# Uses of memory that a sample takes. Temporaries count as well in part, which no kind says.
_OF_SAMPLES = frozenset(KINDS.index(kind) for kind in ("activation", "input"))
_INITIALIZE, _UPDATE = MOMENTS.index("initialize"), MOMENTS.index("update")


@dataclass(frozen=True)
class _Level:
    """A peak above initialisation: its bytes, and the bytes of activations and batches among them."""

    bytes_: float = 0.0
    of_samples: float = 0.0


@dataclass(frozen=True)
class _Levels:
    """Bytes of one run.

    Attributes:
        initialize: live when `deepspeed.initialize` returns.
        backward: the peak outside the optimizer's step.
        update: the peak in the optimizer's step.
    """

    initialize: float
    backward: _Level
    update: _Level


def foreseen_arm(runs: Sequence[ForeseenRun], device: str) -> ForeseenArm | None:
    """Returns the bytes of an arm; None if no run has foreseen a step.

    If two runs have the same events, the line goes through larger sizes than theirs. At a small size another event may
    have the peak, whose bytes hardly grow. If all runs have one size, activations and batches are taken as growing.

    Args:
        runs: of one configuration, at one micro-batch size or more. The smallest and the largest count.
        device: `cuda` or `cpu`. A processor has one memory, in which offloaded states and data sets lie too.
    """
    whole = sorted((run for run in runs if not run.stopped and _has_step(run)), key=lambda run: run.micro_batch)
    if not whole:
        return None
    small, large = whole[0], whole[-1]
    sized = {run.micro_batch: run for run in (small, large)}
    if small.micro_batch < large.micro_batch and have_same_events(small, large):
        sizes = {round(share * large.micro_batch) for share in _SHARES[device]}
        sized = {size: scaled_run(small, larger=large, micro_batch=size) for size in sorted(sizes)}
    levels = {size: _levels(run, device) for size, run in sized.items()}
    return ForeseenArm(
        ds_config=large.ds_config,
        initialize=SizeLine(levels[max(levels)].initialize),
        backward=_line({size: each.backward for size, each in levels.items()}),
        update=_line({size: each.update for size, each in levels.items()}),
        host=0.0 if device == "cpu" else host_peak(whole[-1]).held,
    )


def _line(levels: Mapping[int, _Level]) -> SizeLine:
    """Returns the line that is nearest to the levels of some sizes."""
    if len(levels) > 1:
        return SizeLine.near({size: level.bytes_ for size, level in levels.items()})
    ((size, level),) = levels.items()
    return SizeLine(level.bytes_ - level.of_samples, level.of_samples / max(1, size))


def _has_step(run: ForeseenRun) -> bool:
    return any(moment.name == _UPDATE for moment in run.moments)


def _levels(run: ForeseenRun, device: str) -> _Levels:
    if device == "cpu":
        return _levels_on_processor(run)
    sizes = [rounded(each.size, PLACES[each.place]) for each in run.storages]
    is_here = [each.place == _DEVICE for each in run.storages]
    live, of_samples, initialize = 0.0, 0.0, 0.0
    most = {"backward": _Level(), "update": _Level()}
    for part, events in _parts(run):
        peak, then = live, of_samples
        for event in events:
            if not is_here[event.storage]:
                continue
            change = sizes[event.storage] if event.is_made else -sizes[event.storage]
            live += change
            of_samples += change if run.storages[event.storage].kind in _OF_SAMPLES else 0
            if live > peak:
                peak, then = live, of_samples
        if part == "initialize":
            initialize = live
        elif peak - initialize > most[part].bytes_:
            most[part] = _Level(peak - initialize, then)
    return _Levels(initialize, most["backward"], most["update"])


def _levels_on_processor(run: ForeseenRun) -> _Levels:
    """Returns the levels of a process's whole memory: its heap with all holes, and that of the thread that gathers."""
    heap, live, of_samples, threads = CHeap(), 0, 0, 0
    initialize, held_then = 0, 0
    most = {"backward": _Level(), "update": _Level()}
    for part, events in _parts(run):
        peak, then, held = live, of_samples, 0
        for storage, is_made in events:
            size, kind, place, _ = run.storages[storage]
            if place == _THREAD:
                threads = max(threads, size)
            elif is_made:
                heap.allocate(storage, size)
            else:
                heap.free(storage)
            change = size if is_made else -size
            live += change
            of_samples += change if kind in _OF_SAMPLES else 0
            if live > peak:
                peak, then = live, of_samples
            held = max(held, heap.held)
        if part == "initialize":
            initialize, held_then = live, heap.held
            continue
        # An update takes few large blocks, and those that the passes have freed.
        with_holes = held - held_then + threads if part == "backward" else 0
        above = max(peak - initialize, with_holes) + run.data_bytes
        if above > most[part].bytes_:
            most[part] = _Level(above, then)
    return _Levels(initialize, most["backward"], most["update"])


def _parts(run: ForeseenRun) -> Iterator[tuple[str, Sequence[MemoryEvent]]]:
    """Yields the events of each moment, with the part of the run that it belongs to."""
    last = max((place for place, moment in enumerate(run.moments) if moment.name == _INITIALIZE), default=-1)
    for place, (moment, following) in enumerate(zip_longest(run.moments, run.moments[1:])):
        part = "initialize" if place <= last else "update" if moment.name == _UPDATE else "backward"
        yield part, run.events[moment.event : following.event if following else len(run.events)]
