"""What a larger micro-batch changes in a run, learned from the runs of another arm at two sizes. Pure.

Activations and their operations do not depend on ZeRO's stage. So one pair of runs shows how each kind of storage, and
each kind of operation, grows. That spares the second run of all other arms, if a run takes long.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

from trial_lib.foresee.time.links import COLLECTIVES, DISK
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, OPERATIONS, ForeseenRun, Moment, Operation, Storage

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
    """How storages and operations grow from one micro-batch to another.

    Attributes:
        micro_batch: the other one (samples).
        storages: new size by the moment that makes it, kind, place and size.
        operations: new FLOPs and moved bytes by moment, kind, data type, FLOPs and moved bytes.
        sure: the share of the pair's bytes whose growth is unambiguous.
    """

    micro_batch: int
    storages: Mapping[tuple[int, int, int, int], int]
    operations: Mapping[tuple[int, int, str, float, float], tuple[float, float]]
    sure: float

    def of_another_arm(self, run: ForeseenRun) -> ForeseenRun | None:
        """Returns a run of another arm at the other micro-batch; None if its passes are not those of the pair."""
        grown, share = self._grown(run)
        return grown if share >= SURE else None

    def of(self, run: ForeseenRun) -> ForeseenRun:
        """Returns a run at the other micro-batch. What the pair does not have stays as it is."""
        return self._grown(run)[0]

    def _grown(self, run: ForeseenRun) -> tuple[ForeseenRun, float]:
        """Returns a run at the other micro-batch, and the share of its passes that the pair has as well."""
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
        """The smallest of the three shares."""
        return min(inside / whole if whole else 1.0 for inside, whole in zip(self._inside, self._all, strict=True))


def _work_of(run: ForeseenRun, operation: Operation) -> tuple[int, str, float, float]:
    """Returns kind, data type and work of an operation. Each run has a list of data types in an order of its own."""
    dtype = run.dtypes[operation.dtype] if run.dtypes else ""
    return operation.kind, dtype, operation.flops, operation.moved


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
            work.add((moment, *_work_of(small, do)), (its_do.flops, its_do.moved), do.moved)
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
