"""The memory model's prior from foreseen runs: the bytes of an arm's moments, and their growth with the micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from trial_lib.foresee.memory.offloaded import host_peak
from trial_lib.foresee.memory.rounding import rounded
from trial_lib.foresee.memory.scaled_run import have_same_events, scaled_run
from trial_lib.memory.foreseen_bytes import ForeseenArm, SizeLine
from trial_lib.wire.foreseen_run import MOMENTS, PLACES, ForeseenRun

_DEVICE = PLACES.index("device")
# The line is taken at this many times the larger size, and at twice as many.
_BEYOND = 4
_INITIALIZE, _UPDATE = MOMENTS.index("initialize"), MOMENTS.index("update")


@dataclass(frozen=True)
class _Levels:
    """Bytes of one run.

    Attributes:
        initialize: live when `deepspeed.initialize` returns.
        backward: the most above that, outside the optimizer's step.
        update: the most above that in the optimizer's step.
    """

    initialize: float
    backward: float
    update: float


def foreseen_arm(runs: Sequence[ForeseenRun], device: str) -> ForeseenArm | None:
    """Returns the bytes of an arm; None if no run has foreseen a step.

    If two runs have the same events, the line goes through larger sizes than theirs. At a small size another event may
    have the peak, whose bytes hardly grow.

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

    def line(name: str) -> SizeLine:
        return SizeLine.through((small.micro_batch, getattr(one, name)), (large.micro_batch, getattr(other, name)))

    return ForeseenArm(
        ds_config=ds_config,
        initialize=SizeLine(other.initialize),
        backward=line("backward"),
        update=line("update"),
        host=0.0 if device == "cpu" else host_peak(whole[-1]).held,
    )


def _has_step(run: ForeseenRun) -> bool:
    return any(moment.name == _UPDATE for moment in run.moments)


def _levels(run: ForeseenRun, device: str) -> _Levels:
    in_one = device == "cpu"
    # The C library rounds to a few bytes only.
    sizes = [each.size if in_one else rounded(each.size, PLACES[each.place]) for each in run.storages]
    is_here = [in_one or each.place == _DEVICE for each in run.storages]
    last = max((place for place, moment in enumerate(run.moments) if moment.name == _INITIALIZE), default=-1)
    live, initialize = 0.0, 0.0
    most = {"backward": 0.0, "update": 0.0}
    for place, (moment, following) in enumerate(zip_longest(run.moments, run.moments[1:])):
        peak = live
        for event in run.events[moment.event : following.event if following else len(run.events)]:
            change = sizes[event.storage] if event.is_made else -sizes[event.storage]
            live += change if is_here[event.storage] else 0
            peak = max(peak, live)
        if place <= last:
            initialize = live
        else:
            part = "update" if moment.name == _UPDATE else "backward"
            most[part] = max(most[part], peak - initialize)
    data = run.data_bytes if in_one else 0
    return _Levels(initialize, most["backward"] + data, most["update"] + data)
