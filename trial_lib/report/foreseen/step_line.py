"""The memory of one optimizer step over its events, for a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from trial_lib.foresee.memory.live_bytes import MomentSpan, time_line
from trial_lib.foresee.memory.rounding import rounded
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun

DEVICE, HOST = ("device",), ("host", "pinned")

# What lies longest is drawn lowest, so that what comes and goes rests on a flat floor.
_FROM_BELOW = ("parameter", "optimizer", "gradient", "buffer", "input", "activation", "temporary")
# A point more for each pixel of a drawing shows nothing more.
_MOST_POINTS = 600

_Point = tuple[int, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A moment of a step: `start` is the number of its first event, `end` that of the event after its last one."""

    name: str
    micro_batch: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """The live bytes of one place during an optimizer step.

    Attributes:
        samples: of a micro-batch.
        kinds: of memory, the bottom of the drawing first.
        events: number of each point, from the step's first event.
        bytes: of each kind at each point; as many as `events`.
        parts: the moments of the step, in order.
        peak: the index of the point with the most bytes.
        skipped: micro-batches between the first and the last one. They are left out.
    """

    samples: int
    kinds: tuple[str, ...]
    events: tuple[int, ...]
    bytes: tuple[tuple[float, ...], ...]
    parts: tuple[StepPart, ...]
    peak: int
    skipped: int = 0

    @property
    def micro_batches(self) -> int:
        """The micro-batches of the step, those that are left out included."""
        return max((part.micro_batch for part in self.parts), default=-1) + 1

    @property
    def most(self) -> float:
        """The live bytes at the peak."""
        return sum(self.bytes[self.peak])

    @property
    def peak_part(self) -> StepPart:
        """The moment of the peak. A point is the state after an event, so it may end its moment."""
        event = self.events[self.peak]
        return next((part for part in self.parts if part.start < event <= part.end), self.parts[0])


def step_line(run: ForeseenRun, places: Sequence[str] = DEVICE) -> StepLine | None:
    """Returns the live bytes of the run's last optimizer step. In the first one the optimizer's states appear.

    Args:
        run: of a rank.
        places: names of `PLACES`, which are added up.

    Returns:
        None if the run has no step that updates, or nothing lies in those places.
    """
    update = MOMENTS.index("update")
    step = max((moment.step for moment in run.moments if moment.name == update), default=0)
    if not step:
        return None
    lines = [time_line(run, step, place, most_points=2 * len(run.events) + 2) for place in places]
    live = {
        points[0].event: tuple(sum(sizes) for sizes in zip(*(point.by_kind for point in points), strict=True))
        for points in zip(*(line.points for line in lines), strict=True)
    }
    # Micro-batches of a pipeline interleave, so none repeats another.
    spans, skipped = ([each for each in lines[0].spans if _events(each)], 0)
    if not run.is_pipeline:
        spans, skipped = _without_repetitions(spans)
    if not live or not spans:
        return None
    live[spans[0].begin - 1] = _before(run, spans[0].begin, live[spans[0].begin], places)
    parts: list[StepPart] = []
    points: list[_Point] = []
    shown = 0
    for span in spans:
        parts.append(StepPart(name=span.name, micro_batch=span.micro_batch, start=shown, end=shown + _events(span)))
        points.append((shown, live[span.begin - 1]))
        points += [(shown + 1 + event - span.begin, live[event]) for event in range(span.begin, span.end)]
        shown = parts[-1].end
    if not any(any(each) for _, each in points):
        return None
    points = _thinned(points)
    filled = [KINDS.index(kind) for kind in _FROM_BELOW if any(each[KINDS.index(kind)] for _, each in points)]
    return StepLine(
        samples=run.micro_batch,
        kinds=tuple(KINDS[index] for index in filled),
        events=tuple(event for event, _ in points),
        bytes=tuple(tuple(each[index] for index in filled) for _, each in points),
        parts=tuple(parts),
        peak=max(range(len(points)), key=lambda index: sum(points[index][1])),
        skipped=skipped,
    )


def _before(run: ForeseenRun, event: int, after: Sequence[float], places: Sequence[str]) -> tuple[float, ...]:
    """Returns the live bytes by kind before an event, from those after it."""
    storage, is_made = run.storages[run.events[event].storage], run.events[event].is_made
    before, place = list(after), PLACES[storage.place]
    if place in places:
        before[storage.kind] -= rounded(storage.size, place) * (1 if is_made else -1)
    return tuple(before)


def _without_repetitions(spans: Sequence[MomentSpan]) -> tuple[list[MomentSpan], int]:
    """Returns the moments that have events, of the first and the last micro-batch, and the number of the others."""
    last = max((span.micro_batch for span in spans), default=0)
    return [span for span in spans if span.micro_batch in (0, last) and _events(span)], max(last - 1, 0)


def _events(span: MomentSpan) -> int:
    return span.end - span.begin


def _thinned(points: list[_Point]) -> list[_Point]:
    """Returns fewer points: of each group the lowest and the highest, so that no peak is lost."""
    size = -(-2 * len(points) // _MOST_POINTS)
    if size <= 2:
        return points
    kept: list[_Point] = []
    for start in range(0, len(points), size):
        group = range(start, min(start + size, len(points)))
        ends = {choose(group, key=lambda index: sum(points[index][1])) for choose in (min, max)}
        kept += [points[index] for index in sorted(ends)]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]
