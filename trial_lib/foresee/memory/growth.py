"""What a larger micro-batch changes in a run, learned from the runs of another arm at two sizes. Pure.

Activations and their operations do not depend on ZeRO's stage. So one pair of runs shows how each kind of storage, and
each kind of operation, grows. That spares the second run of all other arms, if a run takes long.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

from trial_lib.wire.foreseen_run import ForeseenRun, Moment, Operation, Storage

_T = TypeVar("_T")
_AHEAD = 12
_ROUNDED = 1e-6

SURE = 0.95
"""A growth is used if at least this share of the pair's bytes grows in one way only."""


@dataclass(frozen=True)
class Growth:
    """How storages and operations grow from one micro-batch to another.

    Attributes:
        micro_batch: the other one (samples).
        storages: new size by the moment that makes it, kind, place and size.
        operations: new FLOPs and moved bytes by moment, kind, data type, FLOPs and moved bytes.
        sure: the share of the pair's bytes whose growth is unambiguous.
    """

    micro_batch: int
    storages: Mapping[tuple[int, int, int, int], int]
    operations: Mapping[tuple[int, int, int, float, float], tuple[float, float]]
    sure: float

    def of(self, run: ForeseenRun) -> ForeseenRun:
        """Returns a run at the other micro-batch. What the pair does not have stays as it is."""
        storages = list(run.storages)
        operations: list[Operation] = []
        for moment, made, done in _moments(run):
            operations += [self._operation(moment, each) for each in done]
            for index in made:
                one = storages[index]
                key = moment, one.kind, one.place, one.size
                storages[index] = one._replace(size=self.storages.get(key, one.size))
        return replace(
            run,
            micro_batch=self.micro_batch,
            storages=tuple(storages),
            operations=tuple(operations or run.operations),
            loading_s=tuple(seconds * self.micro_batch / run.micro_batch for seconds in run.loading_s),
        )

    def _operation(self, moment: int, operation: Operation) -> Operation:
        key = moment, operation.kind, operation.dtype, operation.flops, operation.moved
        flops, moved = self.operations.get(key, (operation.flops, operation.moved))
        return operation.with_work(flops, moved)


def growth_between(small: ForeseenRun, large: ForeseenRun) -> Growth | None:
    """Returns what grows between two runs of one arm; None if they cannot be compared well enough.

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
            work.add((moment, do.kind, do.dtype, do.flops, do.moved), (its_do.flops, its_do.moved), do.moved)
    sure = min(sizes.sure, work.sure) if small.operations else sizes.sure
    if sure < SURE:
        return None
    return Growth(large.micro_batch, sizes.most(), work.most(), sure)


def counterparts(mine: Sequence[Moment], theirs: Sequence[Moment]) -> list[int] | None:
    """Returns for each moment of a run the index of the same moment of another run; None if one has none.

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
    """Counts what each key becomes, with weights."""

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
        """The commonest of each key."""
        return {key: each.most_common(1)[0][0] for key, each in self._seen.items()}


def _aligned(one: Sequence[_T], other: Sequence[_T], fits: Callable[[_T, _T], bool]) -> Iterator[tuple[_T, _T]]:
    """Yields the pairs of two sequences that fit, in order. What has no partner within a few places is left out."""
    left = right = 0
    while left < len(one) and right < len(other):
        ahead = next((step for step in range(_AHEAD) if _is_pair(one, left, other, right + step, fits)), None)
        behind = next((step for step in range(_AHEAD) if _is_pair(one, left + step, other, right, fits)), None)
        if ahead is None and behind is None:
            left, right = left + 1, right + 1
            continue
        if behind is None or (ahead is not None and ahead <= behind):
            right += ahead or 0
        else:
            left += behind
        yield one[left], other[right]
        left, right = left + 1, right + 1


def _is_pair(one: Sequence[_T], left: int, other: Sequence[_T], right: int, fits: Callable[[_T, _T], bool]) -> bool:
    return left < len(one) and right < len(other) and fits(one[left], other[right])


def _may_be(mine: Storage, its: Storage, most: float) -> bool:
    """Whether a storage may be the other at the other micro-batch: equal, or changed by the ratio at most."""
    return (mine.kind, mine.place) == (its.kind, its.place) and _is_between(mine.size, its.size, most)


def _may_do(mine: Operation, its: Operation, most: float) -> bool:
    return (mine.kind, mine.dtype) == (its.kind, its.dtype) and _is_between(mine.moved, its.moved, most)


def _is_between(mine: float, its: float, most: float) -> bool:
    least, most = sorted((mine, most * mine))
    return least * (1 - _ROUNDED) <= its <= most * (1 + _ROUNDED)


def _moments(run: ForeseenRun) -> Iterator[tuple[int, list[int], Sequence[Operation]]]:
    """Yields each moment's name, the indexes of the storages that it makes, and its operations."""
    for moment, following in zip_longest(run.moments, run.moments[1:]):
        events = run.events[moment.event : following.event if following else len(run.events)]
        done = run.operations[moment.operation : following.operation if following else len(run.operations)]
        yield moment.name, [event.storage for event in events if event.is_made], done
