"""The memory of one optimizer step over its events, from a foreseen run."""

from collections.abc import Sequence
from itertools import pairwise

from trial_lib.report.foreseen.plan_view import StepLine, StepPart
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun

DEVICE, HOST = ("device",), ("host", "pinned")

# What lies longest is drawn lowest, so that what comes and goes rests on a flat floor.
_FROM_BELOW = ("parameter", "optimizer", "gradient", "buffer", "input", "activation", "temporary")
# A point more for each pixel of a drawing shows nothing more.
_MOST_POINTS = 600


def step_line(run: ForeseenRun, places: Sequence[str] = DEVICE) -> StepLine | None:
    """Returns the live bytes of the run's last optimizer step. In the first one the optimizer's states appear.

    Args:
        run: of a rank.
        places: names of `PLACES`, which are added up.

    Returns:
        None if the run has no whole step, or nothing lies in those places.
    """
    parts, skipped = _parts(run)
    if not parts:
        return None
    wanted = {PLACES.index(place) for place in places}
    row = [_FROM_BELOW.index(kind) for kind in KINDS]
    live = [0.0] * len(_FROM_BELOW)
    points: list[tuple[int, tuple[float, ...]]] = []
    at = 0
    for part, first in parts:
        for index in range(at, first + part.end - part.start):
            if index == first:
                points.append((part.start, tuple(live)))
            storage = run.storages[run.events[index].storage]
            if storage.place in wanted:
                live[row[storage.kind]] += storage.size if run.events[index].is_made else -storage.size
                if index >= first:
                    points.append((part.start + index - first + 1, tuple(live)))
        at = first + part.end - part.start
    if not any(any(each) for _, each in points):
        return None
    points = _thinned(points)
    filled = [index for index in range(len(_FROM_BELOW)) if any(each[index] for _, each in points)]
    return StepLine(
        kinds=tuple(_FROM_BELOW[index] for index in filled),
        events=tuple(event for event, _ in points),
        bytes=tuple(tuple(each[index] for index in filled) for _, each in points),
        parts=tuple(part for part, _ in parts),
        peak=max(range(len(points)), key=lambda index: sum(points[index][1])),
        skipped=skipped,
    )


def _parts(run: ForeseenRun) -> tuple[list[tuple[StepPart, int]], int]:
    """Returns the moments of the last step that updates, each with its first event in the run, and the skipped ones.

    Of many micro-batches only the first and the last one are left, because all others repeat them.
    """
    update = MOMENTS.index("update")
    step = max((moment.step for moment in run.moments if moment.name == update), default=0)
    ends = [after.event for _, after in pairwise(run.moments)] + [len(run.events)]
    of_step = [(moment, end) for moment, end in zip(run.moments, ends, strict=True) if moment.step == step > 0]
    last = max((moment.micro_batch for moment, _ in of_step), default=0)
    parts: list[tuple[StepPart, int]] = []
    shown = 0
    for moment, end in of_step:
        if moment.micro_batch in (0, last) and end > moment.event:
            start, shown = shown, shown + end - moment.event
            part = StepPart(name=MOMENTS[moment.name], micro_batch=moment.micro_batch, start=start, end=shown)
            parts.append((part, moment.event))
    return parts, max(last - 1, 0)


def _thinned(points: list[tuple[int, tuple[float, ...]]]) -> list[tuple[int, tuple[float, ...]]]:
    """Returns fewer points: of each group the lowest and the highest, so that no peak is lost."""
    size = -(-2 * len(points) // _MOST_POINTS)
    if size <= 2:
        return points
    kept: list[tuple[int, tuple[float, ...]]] = []
    for start in range(0, len(points), size):
        group = range(start, min(start + size, len(points)))
        ends = {choose(group, key=lambda index: sum(points[index][1])) for choose in (min, max)}
        kept += [points[index] for index in sorted(ends)]
    return kept
