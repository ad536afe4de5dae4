"""The memory model's prior from foreseen runs: the bytes of an arm's moments, and their growth with the micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from trial_lib.foresee.memory.offloaded import host_peak
from trial_lib.foresee.memory.rounding import rounded
from trial_lib.foresee.memory.scaled_run import have_same_events, scaled_run
from trial_lib.memory.foreseen_bytes import ForeseenArm, SizeLine
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun

_DEVICE = PLACES.index("device")
# The line is taken at this many times the larger size, and at twice as many.
_BEYOND = 4
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
    ds_config = large.ds_config
    if small.micro_batch < large.micro_batch and have_same_events(small, large):
        sizes = (_BEYOND * large.micro_batch, 2 * _BEYOND * large.micro_batch)
        small, large = (scaled_run(small, larger=large, micro_batch=size) for size in sizes)
    one, other = _levels(small, device), _levels(large, device)
    return ForeseenArm(
        ds_config=ds_config,
        initialize=SizeLine(other.initialize),
        backward=_line(small, one.backward, large, other.backward),
        update=_line(small, one.update, large, other.update),
        host=0.0 if device == "cpu" else host_peak(whole[-1]).held,
    )


def _line(small: ForeseenRun, one: _Level, large: ForeseenRun, other: _Level) -> SizeLine:
    if small.micro_batch < large.micro_batch:
        return SizeLine.through((small.micro_batch, one.bytes_), (large.micro_batch, other.bytes_))
    return SizeLine(other.bytes_ - other.of_samples, other.of_samples / max(1, large.micro_batch))


def _has_step(run: ForeseenRun) -> bool:
    return any(moment.name == _UPDATE for moment in run.moments)


def _levels(run: ForeseenRun, device: str) -> _Levels:
    in_one = device == "cpu"
    # The C library rounds to a few bytes only.
    sizes = [each.size if in_one else rounded(each.size, PLACES[each.place]) for each in run.storages]
    is_here = [in_one or each.place == _DEVICE for each in run.storages]
    last = max((place for place, moment in enumerate(run.moments) if moment.name == _INITIALIZE), default=-1)
    live, of_samples, initialize = 0.0, 0.0, 0.0
    most = {"backward": _Level(), "update": _Level()}
    data = run.data_bytes if in_one else 0
    for place, (moment, following) in enumerate(zip_longest(run.moments, run.moments[1:])):
        peak, then = live, of_samples
        for event in run.events[moment.event : following.event if following else len(run.events)]:
            if not is_here[event.storage]:
                continue
            change = sizes[event.storage] if event.is_made else -sizes[event.storage]
            live += change
            of_samples += change if run.storages[event.storage].kind in _OF_SAMPLES else 0
            if live > peak:
                peak, then = live, of_samples
        if place <= last:
            initialize = live
            continue
        part, above = "update" if moment.name == _UPDATE else "backward", peak - initialize + data
        if above > most[part].bytes_:
            most[part] = _Level(above, then)
    return _Levels(initialize, most["backward"], most["update"])
