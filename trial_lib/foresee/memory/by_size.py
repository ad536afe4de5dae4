"""Live bytes of any micro-batch, from two runs of one arm at two micro-batches.

If both runs have the same events, each storage is a line in the micro-batch, and so is the sum after each event. A
moment's peak is the highest of these lines, which changes from one event to another: the upper envelope has it exactly.

A step of the larger micro-batch may have one micro-batch where that of the smaller has two. Then the growth of storages
between the two (`growth.py`) makes of each run its like at the other size, and each number of micro-batches has lines
of its own. If the runs have other events for another reason, each moment's peak is taken as one line through two
points, which may miss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trial_lib.foresee.memory.growth import growth_between
from trial_lib.foresee.memory.live_bytes import LiveBytes, MomentPeak, live_bytes
from trial_lib.foresee.memory.rounding import rounded
from trial_lib.foresee.memory.scaled_run import have_same_events
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun


@dataclass(frozen=True)
class PeakLine:
    """Live bytes as a line in the micro-batch: `base + slope * micro_batch`.

    Attributes:
        base: bytes.
        slope: bytes for each sample.
        kinds: base and slope of each kind, in the order of `KINDS`.
        event: index of the event.
    """

    base: float
    slope: float
    kinds: tuple[tuple[float, float], ...]
    event: int

    def at(self, micro_batch: float) -> float:
        """Returns the bytes at a micro-batch."""
        return self.base + self.slope * micro_batch


@dataclass(frozen=True, kw_only=True)
class MomentLines:
    """The peak of one moment for any micro-batch.

    Attributes:
        name: one of `MOMENTS`.
        step: the optimizer step, from 1.
        micro_batch: of the step, from 0.
        lines: of which the highest is the peak.
        at_begin: live bytes when it begins.
        at_end: live bytes when it ends.
    """

    name: str
    step: int
    micro_batch: int
    lines: tuple[PeakLine, ...]
    at_begin: PeakLine
    at_end: PeakLine

    def at(self, micro_batch: float) -> MomentPeak:
        """Returns the moment's peak at a micro-batch."""
        highest = max(self.lines, key=lambda line: line.at(micro_batch))
        return MomentPeak(
            name=self.name,
            step=self.step,
            micro_batch=self.micro_batch,
            peak=highest.at(micro_batch),
            by_kind=tuple(base + slope * micro_batch for base, slope in highest.kinds),
            at_begin=self.at_begin.at(micro_batch),
            at_end=self.at_end.at(micro_batch),
            event=highest.event,
        )


@dataclass(frozen=True, kw_only=True)
class BySize:
    """Live bytes in one place for any micro-batch.

    Attributes:
        place: one of `PLACES`.
        moments: of the run, in order.
        fewer: the same with fewer micro-batches in a step; empty if there is one number of them.
        fewer_from: the smallest micro-batch, in samples, whose steps have that fewer.
    """

    place: str
    moments: tuple[MomentLines, ...]
    fewer: tuple[MomentLines, ...] = ()
    fewer_from: int = 0

    def at(self, micro_batch: float) -> LiveBytes:
        """Returns the live bytes at a micro-batch, in samples."""
        moments = tuple(moment.at(micro_batch) for moment in self._moments_at(micro_batch))
        return LiveBytes(place=self.place, moments=moments)

    def peak_at(self, micro_batch: float) -> float:
        """Returns the bytes at the peak of the run."""
        lines = (line for moment in self._moments_at(micro_batch) for line in moment.lines)
        return max((line.at(micro_batch) for line in lines), default=0.0)

    def _moments_at(self, micro_batch: float) -> tuple[MomentLines, ...]:
        return self.fewer if self.fewer and micro_batch >= self.fewer_from else self.moments


def by_size(one: ForeseenRun, other: ForeseenRun | None = None, place: str = "device") -> BySize:
    """Returns the live bytes of any micro-batch.

    Args:
        one: a run.
        other: the same arm with another micro-batch. Without it the bytes are the same for all.
        place: one of `PLACES`.

    Raises:
        ValueError: both runs have the same micro-batch.
    """
    if other is None:
        return BySize(place=place, moments=_by_event(one, one, place))
    if one.micro_batch == other.micro_batch:
        raise ValueError("the two runs have the same micro_batch")
    if have_same_events(one, other):
        return BySize(place=place, moments=_by_event(one, other, place))
    small, large = sorted((one, other), key=lambda run: run.micro_batch)
    if _micro_batches(large) < _micro_batches(small):
        grows, shrinks = growth_between(small, large), growth_between(large, small)
        if grows is not None and shrinks is not None:
            return BySize(
                place=place,
                moments=_by_event(small, grows.of(small), place),
                fewer=_by_event(large, shrinks.of(large), place),
                fewer_from=large.micro_batch,
            )
    return BySize(place=place, moments=_by_moment(one, other, place))


def _micro_batches(run: ForeseenRun) -> int:
    """Returns how many micro-batches a step of a run has."""
    return max((moment.micro_batch for moment in run.moments), default=0) + 1


def _by_event(one: ForeseenRun, other: ForeseenRun, place: str) -> tuple[MomentLines, ...]:
    index = PLACES.index(place)
    between = other.micro_batch - one.micro_batch
    pieces: list[tuple[float, float]] = []
    for mine, its in zip(one.storages, other.storages, strict=True):
        size = rounded(mine.size, place) if mine.place == index else 0.0
        slope = (rounded(its.size, place) - size) / between if mine.place == index and between else 0.0
        pieces.append((size - slope * one.micro_batch, slope))
    live = [[0.0, 0.0] for _ in KINDS]
    base = slope = 0.0
    found: list[MomentLines] = []
    for moment, its_events in one.events_by_moment():
        first = moment.event
        points = [(slope, base, -1)]
        at_begin, before = _line(live, first), [each.copy() for each in live]
        for event in its_events:
            storage, is_made = one.events[event]
            sign = 1 if is_made else -1
            piece = pieces[storage]
            base, slope = base + sign * piece[0], slope + sign * piece[1]
            points.append((slope, base, event))
        top = {event for _, _, event in _envelope(points)}
        lines = [at_begin] if -1 in top else []
        live = before
        for event in its_events:
            storage, is_made = one.events[event]
            sign = 1 if is_made else -1
            kind = live[one.storages[storage].kind]
            kind[0] += sign * pieces[storage][0]
            kind[1] += sign * pieces[storage][1]
            if event in top:
                lines.append(_line(live, event))
        found.append(
            MomentLines(
                name=MOMENTS[moment.name],
                step=moment.step,
                micro_batch=moment.micro_batch,
                lines=tuple(lines),
                at_begin=at_begin,
                at_end=_line(live, its_events.stop),
            )
        )
    return tuple(found)


def _line(live: Sequence[Sequence[float]], event: int) -> PeakLine:
    kinds = tuple((each[0], each[1]) for each in live)
    return PeakLine(sum(base for base, _ in kinds), sum(slope for _, slope in kinds), kinds, event)


def _envelope(points: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Returns the (slope, base, event) of the lines that are the highest for some micro-batch above 0."""
    hull: list[tuple[float, float, int]] = []
    for point in sorted(points):
        if hull and point[0] - hull[-1][0] < 1e-9:
            if point[1] <= hull[-1][1]:
                continue
            hull.pop()
        while hull and (hull[-1][1] <= point[1] or (len(hull) > 1 and _is_below(hull[-2], hull[-1], point))):
            hull.pop()
        hull.append(point)
    return hull


def _is_below(one: tuple[float, float, int], middle: tuple[float, float, int], other: tuple[float, float, int]) -> bool:
    """Returns whether a line is nowhere above two others, between whose slopes its own is."""
    return (one[1] - other[1]) * (middle[0] - one[0]) <= (one[1] - middle[1]) * (other[0] - one[0])


def _pairs(mine: Sequence[MomentPeak], theirs: Sequence[MomentPeak]) -> list[tuple[MomentPeak, MomentPeak]]:
    """Returns each moment of a run with that of another run: by their places, if both have the same in the same order.

    If not, a moment goes with the highest of its name in the same micro-batch, or in the last that the other has.
    """
    places = [[(each.name, each.step, each.micro_batch) for each in moments] for moments in (mine, theirs)]
    if places[0] == places[1]:
        return list(zip(mine, theirs, strict=True))
    most = max((each.micro_batch for each in theirs), default=0)
    by_peak = sorted(theirs, key=lambda each: each.peak)
    highest = {(each.name, each.step, each.micro_batch): each for each in by_peak}
    return [(each, highest.get((each.name, each.step, min(each.micro_batch, most)), each)) for each in mine]


def _by_moment(one: ForeseenRun, other: ForeseenRun, place: str) -> tuple[MomentLines, ...]:
    between = other.micro_batch - one.micro_batch
    found: list[MomentLines] = []
    for mine, its in _pairs(live_bytes(one, place).moments, live_bytes(other, place).moments):

        def through(size: float, larger: float) -> tuple[float, float]:
            slope = (larger - size) / between
            return size - slope * one.micro_batch, slope

        kinds = tuple(through(*pair) for pair in zip(mine.by_kind, its.by_kind, strict=True))
        found.append(
            MomentLines(
                name=mine.name,
                step=mine.step,
                micro_batch=mine.micro_batch,
                lines=(PeakLine(*through(mine.peak, its.peak), kinds, mine.event),),
                at_begin=PeakLine(*through(mine.at_begin, its.at_begin), (), mine.event),
                at_end=PeakLine(*through(mine.at_end, its.at_end), (), mine.event),
            )
        )
    return tuple(found)
