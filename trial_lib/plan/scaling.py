"""A foreseen run at another micro-batch size, learned from two runs of one arm."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from trial_lib.messages.foreseen_run import (
    KINDS,
    MOMENTS,
    OPERATIONS,
    PLACES,
    ForeseenRun,
    MemoryEvent,
    Moment,
    Operation,
    Storage,
)
from trial_lib.plan.allocator import rounded
from trial_lib.plan.devices import COLLECTIVES, DISK
from trial_lib.plan.live_bytes import LiveBytes, MomentPeak, live_bytes

# What a larger micro-batch changes in a run, learned from the runs of another arm at two sizes.

_T = TypeVar("_T")
_AHEAD = 12
_ROUNDED = 1e-6

_PASSES = (MOMENTS.index("forward"), MOMENTS.index("backward"))
_ACTIVATION = KINDS.index("activation")
# What ZeRO's stages and offloads send. It differs from arm to arm, and does not grow with the samples.
_SENT = frozenset(map(OPERATIONS.index, (*COLLECTIVES, *DISK, "to_host", "to_device")))

SURE = 0.95
"""A growth is used if at least this share of the pair's bytes grows in one way only.

It stands for another arm if the pair has at least this share of the FLOPs, the moved bytes and the activations in the
passes of that arm.
"""


@dataclass(frozen=True)
class Growth:
    micro_batch: int  # the other one (samples)
    storages: Mapping[tuple[int, int, int, int], int]  # new size by the moment that makes it, kind, place and size
    # New FLOPs and moved bytes by moment, kind, data type, FLOPs and moved bytes
    operations: Mapping[tuple[int, int, str, float, float], tuple[float, float]]
    sure: float  # the share of the pair's bytes whose growth is unambiguous

    def of_another_arm(self, run: ForeseenRun) -> ForeseenRun | None:
        """A run of another arm at the other micro-batch; None if its passes are not those of the pair."""
        grown, share = self._grown(run)
        return grown if share >= SURE else None

    def of(self, run: ForeseenRun) -> ForeseenRun:
        """A run at the other micro-batch. What the pair does not have stays as it is."""
        return self._grown(run)[0]

    def _grown(self, run: ForeseenRun) -> tuple[ForeseenRun, float]:
        storages = list(run.storages)
        operations: list[Operation] = []
        alike = _Share()
        for moment, made, done in _moments(run):
            for each in done:
                key = (moment, *_work_of(run, each))
                if moment in _PASSES and each.kind not in _SENT:
                    alike.add((each.flops, each.moved, 0), is_in=key in self.operations)
                operations.append(each.with_work(*self.operations.get(key, (each.flops, each.moved))))
            for index in made:
                one = storages[index]
                of_storage = moment, one.kind, one.place, one.size
                if moment in _PASSES and one.kind == _ACTIVATION:
                    alike.add((0, 0, one.size), is_in=of_storage in self.storages)
                storages[index] = one._replace(size=self.storages.get(of_storage, one.size))
        grown = replace(
            run,
            micro_batch=self.micro_batch,
            storages=tuple(storages),
            operations=tuple(operations or run.operations),
            loading_s=tuple(seconds * self.micro_batch / run.micro_batch for seconds in run.loading_s),
        )
        return grown, alike.least


class _Share:
    """The share of FLOPs, of moved bytes and of stored ones that is in something."""

    def __init__(self) -> None:
        self._inside, self._all = [0.0] * 3, [0.0] * 3

    def add(self, work: tuple[float, float, float], *, is_in: bool) -> None:
        for index, amount in enumerate(work):
            self._all[index] += amount
            self._inside[index] += amount * is_in

    @property
    def least(self) -> float:
        return min(inside / whole if whole else 1.0 for inside, whole in zip(self._inside, self._all, strict=True))


def _work_of(run: ForeseenRun, operation: Operation) -> tuple[int, str, float, float]:
    # Kind, data type and work of an operation. Each run has a list of data types in an order of its own.
    dtype = run.dtypes[operation.dtype] if run.dtypes else ""
    return operation.kind, dtype, operation.flops, operation.moved


def growth_between(small: ForeseenRun, large: ForeseenRun) -> Growth | None:
    """What grows between two runs of one arm; None if they cannot be compared well enough.

    Storages and operations are paired in their order within each moment. A larger batch may add some, such as a copy
    that a single sample does not need. They are left out. A step may have fewer micro-batches in one of the runs, as a
    global batch that is kept has with a larger micro-batch. Its last one is then the other's last.
    """
    places = counterparts(small.moments, large.moments)
    if places is None or small.dtypes != large.dtypes:
        return None
    most = large.micro_batch / small.micro_batch
    sizes, work = _Paired(), _Paired()
    theirs = list(_moments(large))
    for (moment, made, done), place in zip(_moments(small), places, strict=True):
        _, its_made, its_done = theirs[place]
        one, other = [small.storages[index] for index in made], [large.storages[index] for index in its_made]
        for before, after in _aligned(one, other, lambda mine, its: _may_be(mine, its, most)):
            sizes.add((moment, before.kind, before.place, before.size), after.size, before.size)
        for do, its_do in _aligned(done, its_done, lambda mine, its: _may_do(mine, its, most)):
            work.add((moment, *_work_of(small, do)), (its_do.flops, its_do.moved), do.moved)
    sure = min(sizes.sure, work.sure) if small.operations else sizes.sure
    if sure < SURE:
        return None
    return Growth(large.micro_batch, sizes.most(), work.most(), sure)


def counterparts(mine: Sequence[Moment], theirs: Sequence[Moment]) -> list[int] | None:
    """For each moment of a run the index of the same moment of another run; None if one has none.

    If their steps have other numbers of micro-batches, the last of a step is the other's last, which reduces gradients.
    """
    if {moment[:2] for moment in mine} != {moment[:2] for moment in theirs}:
        return None
    if [moment[:3] for moment in mine] == [moment[:3] for moment in theirs]:
        return list(range(len(theirs)))
    last, its_last = _last_micro_batches(mine), _last_micro_batches(theirs)
    if last == its_last:
        return None
    known = {moment[:3]: index for index, moment in enumerate(theirs)}
    found = []
    for name, step, micro_batch, *_ in mine:
        end = its_last[step]
        place = known.get((name, step, end if micro_batch == last[step] else min(micro_batch, max(0, end - 1))))
        place = known.get((name, step, min(micro_batch, end))) if place is None else place
        if place is None:
            return None
        found.append(place)
    return found


def _last_micro_batches(moments: Sequence[Moment]) -> dict[int, int]:
    last: dict[int, int] = {}
    for moment in moments:
        last[moment.step] = max(last.get(moment.step, 0), moment.micro_batch)
    return last


class _Paired:
    def __init__(self) -> None:
        self._seen: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)

    def add(self, key: Hashable, becomes: Hashable, weight: float) -> None:
        self._seen[key][becomes] += max(1, int(weight))

    @property
    def sure(self) -> float:
        """The share of the weights that the commonest of each key has."""
        total = sum(sum(each.values()) for each in self._seen.values())
        return sum(max(each.values()) for each in self._seen.values()) / total if total else 0.0

    def most(self) -> dict:  # type: ignore[type-arg]
        return {key: each.most_common(1)[0][0] for key, each in self._seen.items()}


def _aligned(one: Sequence[_T], other: Sequence[_T], fits: Callable[[_T, _T], bool]) -> Iterator[tuple[_T, _T]]:
    # The pairs of two sequences that fit, in order. What has no partner within a few places is left out.
    def is_pair(mine: int, its: int) -> bool:
        return mine < len(one) and its < len(other) and fits(one[mine], other[its])

    left = right = 0
    while left < len(one) and right < len(other):
        ahead = next((step for step in range(_AHEAD) if is_pair(left, right + step)), None)
        behind = next((step for step in range(_AHEAD) if is_pair(left + step, right)), None)
        if ahead is None and behind is None:
            left, right = left + 1, right + 1
            continue
        if behind is None or (ahead is not None and ahead <= behind):
            right += ahead or 0
        else:
            left += behind
        yield one[left], other[right]
        left, right = left + 1, right + 1


def _may_be(mine: Storage, its: Storage, most: float) -> bool:
    # Whether a storage may be the other at the other micro-batch: equal, or changed by the ratio at most.
    return (mine.kind, mine.place) == (its.kind, its.place) and _is_between(mine.size, its.size, most)


def _may_do(mine: Operation, its: Operation, most: float) -> bool:
    return (mine.kind, mine.dtype) == (its.kind, its.dtype) and _is_between(mine.moved, its.moved, most)


def _is_between(mine: float, its: float, most: float) -> bool:
    least, most = sorted((mine, most * mine))
    return least * (1 - _ROUNDED) <= its <= most * (1 + _ROUNDED)


def _moments(run: ForeseenRun) -> Iterator[tuple[int, list[int], Sequence[Operation]]]:
    for (moment, events), (_, done) in zip(run.events_by_moment(), run.operations_by_moment(), strict=True):
        yield moment.name, [event.storage for event in run.events[events.start : events.stop] if event.is_made], done


# A run of another size, from runs of one program that have the same events.


def have_same_events(one: ForeseenRun, other: ForeseenRun) -> bool:
    """Whether two runs allocate and free alike, in the same moments, and differ in sizes alone.

    The order within a moment in which storages are freed may differ, and empty storages may. DeepSpeed frees gathered
    parameters in the order of a set, which depends on their addresses, and leaves empty ones in their place.
    """
    return (
        (one.events == other.events or _freed_alike(one, other))
        and len(one.storages) == len(other.storages)
        and all(
            (mine.kind, mine.place) == (its.kind, its.place) or not (mine.size or its.size)
            for mine, its in zip(one.storages, other.storages, strict=True)
        )
        and [moment[:4] for moment in one.moments] == [moment[:4] for moment in other.moments]
    )


def _freed_alike(one: ForeseenRun, other: ForeseenRun) -> bool:
    if len(one.events) != len(other.events) or len(one.moments) != len(other.moments):
        return False
    begins = [moment.event for moment in one.moments]
    if begins != [moment.event for moment in other.moments]:
        return False
    bounds = zip([0, *begins], [*begins, len(one.events)], strict=True)
    return [event.is_made for event in one.events] == [event.is_made for event in other.events] and all(
        _of_full(one, begin, end) == _of_full(other, begin, end) for begin, end in bounds
    )


def _of_full(run: ForeseenRun, begin: int, end: int) -> list[MemoryEvent]:
    return sorted(event for event in run.events[begin:end] if run.storages[event.storage].size)


def have_same_operations(one: ForeseenRun, other: ForeseenRun) -> bool:
    """Whether two runs issue the same operations, in the same moments, with other sizes."""
    return [(each.kind, each.dtype, each.where) for each in one.operations] == [
        (each.kind, each.dtype, each.where) for each in other.operations
    ] and [moment[4] for moment in one.moments] == [moment[4] for moment in other.moments]


def scaled_run(
    base: ForeseenRun,
    *,
    larger: ForeseenRun | None = None,
    wider: ForeseenRun | None = None,
    micro_batch: int | None = None,
    world: int | None = None,
) -> ForeseenRun:
    """The run of another micro-batch (from a `larger` run), of another world (from a `wider` one), or of both.

    Raises ValueError if a run that is needed is missing, equals `base` in size, or has other events.
    """
    steps: list[tuple[ForeseenRun, float]] = []
    for name, other, wanted in (("micro_batch", larger, micro_batch), ("world", wider, world)):
        mine = getattr(base, name)
        if wanted is None or wanted == mine:
            continue
        if other is None:
            raise ValueError(f"another {name} needs a second run")
        if (its := getattr(other, name)) == mine:
            raise ValueError(f"the two runs have the same {name}")
        # Shares of the states go with the inverse of the world.
        is_world = name == "world"
        share = (1 / wanted - 1 / mine) / (1 / its - 1 / mine) if is_world else (wanted - mine) / (its - mine)
        steps.append((other, share))
    if not steps:
        return base
    for other, _ in steps:
        if not have_same_events(base, other):
            raise ValueError("the two runs have other events, so no run between them follows")
    storages = []
    for index, storage in enumerate(base.storages):
        size = _along([run.storages[index].size for run, _ in steps], storage.size, steps)
        storages.append(storage._replace(size=max(0, round(size))))
    new_world = base.world if world is None else world
    return replace(
        base,
        storages=tuple(storages),
        operations=_operations(base, steps, new_world),
        micro_batch=base.micro_batch if micro_batch is None else micro_batch,
        world=new_world,
        replicas=base.replicas * new_world // base.world,
    )


def _operations(base: ForeseenRun, steps: Sequence[tuple[ForeseenRun, float]], world: int) -> tuple[Operation, ...]:
    # The operations; none if they differ in more than their sizes.
    if not all(have_same_operations(base, run) for run, _ in steps):
        return ()
    return tuple(
        operation._replace(
            flops=max(0.0, _along([run.operations[index].flops for run, _ in steps], operation.flops, steps)),
            moved=max(0.0, _along([run.operations[index].moved for run, _ in steps], operation.moved, steps)),
            ranks=world if operation.ranks == base.world > 1 else operation.ranks,
        )
        for index, operation in enumerate(base.operations)
    )


def _along(others: Sequence[float], mine: float, steps: Sequence[tuple[ForeseenRun, float]]) -> float:
    return mine + sum((other - mine) * step for other, (_, step) in zip(others, steps, strict=True))


# Live bytes of any micro-batch, from two runs of one arm at two micro-batches.


@dataclass(frozen=True)
class PeakLine:
    """Live bytes as a line in the micro-batch: `base + slope * micro_batch`."""

    base: float  # bytes
    slope: float  # bytes for each sample
    kinds: tuple[tuple[float, float], ...]  # base and slope of each kind, in the order of `KINDS`
    event: int  # index of the event

    def at(self, micro_batch: float) -> float:
        return self.base + self.slope * micro_batch


@dataclass(frozen=True, kw_only=True)
class MomentLines:
    name: str  # one of `MOMENTS`
    step: int  # the optimizer step, from 1
    micro_batch: int  # of the step, from 0
    lines: tuple[PeakLine, ...]  # of which the highest is the peak
    at_begin: PeakLine  # live bytes when it begins
    at_end: PeakLine  # live bytes when it ends

    def at(self, micro_batch: float) -> MomentPeak:
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
    place: str  # one of `PLACES`
    moments: tuple[MomentLines, ...]  # of the run, in order
    # The same with fewer micro-batches in a step; empty if there is one number of them
    fewer: tuple[MomentLines, ...] = ()
    fewer_from: int = 0  # the smallest micro-batch, in samples, whose steps have that fewer

    def at(self, micro_batch: float) -> LiveBytes:
        moments = self.fewer if self.fewer and micro_batch >= self.fewer_from else self.moments
        return LiveBytes(place=self.place, moments=tuple(moment.at(micro_batch) for moment in moments))


def by_size(one: ForeseenRun, other: ForeseenRun | None = None, place: str = "device") -> BySize:
    """Live bytes of any micro-batch, from runs of one arm at two of them. With one run they are the same for all.

    Raises ValueError if both runs have the same micro-batch.
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
    return max((moment.micro_batch for moment in run.moments), default=0) + 1


def _by_event(one: ForeseenRun, other: ForeseenRun, place: str) -> tuple[MomentLines, ...]:
    index = PLACES.index(place)
    between = other.micro_batch - one.micro_batch
    # Each storage as a line in the micro-batch.
    pieces: list[tuple[float, float]] = []
    for mine, its in zip(one.storages, other.storages, strict=True):
        size = rounded(mine.size, place) if mine.place == index else 0.0
        slope = (rounded(its.size, place) - size) / between if mine.place == index and between else 0.0
        pieces.append((size - slope * one.micro_batch, slope))
    live = [[0.0, 0.0] for _ in KINDS]
    base = slope = 0.0
    found: list[MomentLines] = []
    for moment, its_events in one.events_by_moment():
        # The events that have the peak at some micro-batch.
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
        # Their bytes by kind.
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
    # The (slope, base, event) of the lines that are the highest for some micro-batch above 0.
    hull: list[tuple[float, float, int]] = []

    def is_last_below(point: tuple[float, float, int]) -> bool:
        one, middle = hull[-2:]
        return (one[1] - point[1]) * (middle[0] - one[0]) <= (one[1] - middle[1]) * (point[0] - one[0])

    for point in sorted(points):
        if hull and point[0] - hull[-1][0] < 1e-9:
            if point[1] <= hull[-1][1]:
                continue
            hull.pop()
        while hull and (hull[-1][1] <= point[1] or (len(hull) > 1 and is_last_below(point))):
            hull.pop()
        hull.append(point)
    return hull


def _pairs(mine: Sequence[MomentPeak], theirs: Sequence[MomentPeak]) -> list[tuple[MomentPeak, MomentPeak]]:
    """Each moment of a run with that of another run: by their places, if both have the same in the same order.

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
