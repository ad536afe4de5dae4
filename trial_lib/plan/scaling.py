"""The simulated runs of one arm, and what follows from them for other micro-batches and numbers of ranks. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import TypeVar

from zerotune.trial_lib.messages.foreseen_run import (
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
from zerotune.trial_lib.plan.arms import PlanArm
from zerotune.trial_lib.plan.devices import COLLECTIVES, DISK
from zerotune.trial_lib.plan.step_time import kind_of
from zerotune.trial_lib.records.switches import switch_key

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


def storages_of_pairs(small: ForeseenRun, large: ForeseenRun) -> frozenset[int]:
    """The storages whose size is in proportion to the square of the micro-batch, in two runs with the same events: a
    loss compares all samples of a micro-batch.
    """
    mine, its = small.micro_batch**2, large.micro_batch**2
    sizes = zip(small.storages, large.storages, strict=True)
    return frozenset(index for index, (one, other) in enumerate(sizes) if one.size * its == other.size * mine > 0)


def scaled_run(
    base: ForeseenRun,
    *,
    larger: ForeseenRun | None = None,
    wider: ForeseenRun | None = None,
    micro_batch: int | None = None,
    world: int | None = None,
) -> ForeseenRun:
    """The memory of another micro-batch (from a `larger` run), of another world (from a `wider` one), or of both.

    Its operations are those of `base`. Raises ValueError if a run that is needed is missing, equals `base` in size, or
    has other events.
    """
    steps: list[tuple[ForeseenRun, float, frozenset[int], float]] = []
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
        # Storages of pairs of samples go with the square of the micro-batch.
        pairs = frozenset() if is_world else storages_of_pairs(base, other)
        of_pairs = 0.0 if is_world else (wanted**2 - mine**2) / (its**2 - mine**2)
        steps.append((other, share, pairs, of_pairs))
    if not steps:
        return base
    for other, *_ in steps:
        if not have_same_events(base, other):
            raise ValueError("the two runs have other events, so no run between them follows")
    storages = []
    for index, storage in enumerate(base.storages):
        more = 0.0
        for run, share, pairs, of_pairs in steps:
            more += (run.storages[index].size - storage.size) * (of_pairs if index in pairs else share)
        storages.append(storage._replace(size=max(0, round(storage.size + more))))
    new_world = base.world if world is None else world
    return replace(
        base,
        storages=tuple(storages),
        micro_batch=base.micro_batch if micro_batch is None else micro_batch,
        world=new_world,
        replicas=base.replicas * new_world // base.world,
    )


# The runs of one arm at a micro-batch that was not run, and on another number of ranks.

# The operations at a micro-batch that was not run, from two that were, and on another number of ranks.


def at_size(small: ForeseenRun, large: ForeseenRun, micro_batch: int, accumulation: int | None = None) -> ForeseenRun:
    """The run of the arm with another micro-batch. Its storages are those of the nearer run.

    Operations are matched one to one by their order within a moment. If a moment has other operations at the larger
    size, the nearer run's are scaled by the sums of their class. If one run has more micro-batches in a step, its last
    ones count. The accumulation is that of the nearer run by default. Raises ValueError if both runs have the same
    micro-batch.
    """
    if small.micro_batch == large.micro_batch:
        raise ValueError(f"both runs have a micro-batch of {small.micro_batch}")
    small, large = _with_as_many(small, large), _with_as_many(large, small)
    weight = (micro_batch - small.micro_batch) / (large.micro_batch - small.micro_batch)
    nearer = large if weight > 0.5 else small
    operations: list[Operation] = []
    starts: list[int] = []
    if len(small.moments) == len(large.moments):
        for low, high, near in zip(*(run.operations_by_moment() for run in (small, large, nearer)), strict=True):
            starts.append(len(operations))
            operations += _between(low[1], high[1], near[1], weight)
    else:
        operations = _between(small.operations, large.operations, nearer.operations, weight)
        starts = [moment.operation for moment in nearer.moments]
    return replace(
        nearer,
        micro_batch=micro_batch,
        accumulation=accumulation or nearer.accumulation,
        operations=tuple(operations),
        moments=tuple(moment._replace(operation=start) for moment, start in zip(nearer.moments, starts, strict=True)),
        loading_s=_loading(small, large, micro_batch, weight),
        loads_beside=small.loads_beside or large.loads_beside,
    )


def _with_as_many(run: ForeseenRun, other: ForeseenRun) -> ForeseenRun:
    most = max((moment.micro_batch for moment in other.moments), default=0)
    last = _last_micro_batches(run.moments)
    if max(last.values(), default=0) <= most:
        return run
    moments: list[Moment] = []
    operations: list[Operation] = []
    for moment, stretch in run.operations_by_moment():
        if moment.micro_batch >= last[moment.step] - most:
            moments.append(moment._replace(operation=len(operations)))
            operations += stretch
    return replace(run, moments=tuple(moments), operations=tuple(operations))


def _between(
    low: Sequence[Operation], high: Sequence[Operation], near: Sequence[Operation], weight: float
) -> list[Operation]:
    if [_sort(each) for each in low] == [_sort(each) for each in high]:
        return [
            near_by.with_work(_lerp(one.flops, other.flops, weight), _lerp(one.moved, other.moved, weight))
            for one, other, near_by in zip(low, high, near, strict=True)
        ]
    sums = [_sums(each) for each in (low, high, near)]
    factors = {
        sort: tuple(
            _lerp(sums[0].get(sort, (0.0, 0.0))[part], sums[1].get(sort, (0.0, 0.0))[part], weight) / (own[part] or 1.0)
            for part in (0, 1)
        )
        for sort, own in sums[2].items()
    }
    return [each.with_work(each.flops * factors[_sort(each)][0], each.moved * factors[_sort(each)][1]) for each in near]


def _sort(operation: Operation) -> tuple[int, int, int]:
    return operation.kind, operation.ranks, operation.on_host


def _sums(operations: Sequence[Operation]) -> dict[tuple[int, int, int], tuple[float, float]]:
    sums: dict[tuple[int, int, int], tuple[float, float]] = {}
    for each in operations:
        flops, moved = sums.get(_sort(each), (0.0, 0.0))
        sums[_sort(each)] = flops + each.flops, moved + each.moved
    return sums


def _lerp(low: float, high: float, weight: float) -> float:
    # Below the smaller size a line may cross zero.
    return max(0.0, low + (high - low) * weight)


def _loading(small: ForeseenRun, large: ForeseenRun, micro_batch: int, weight: float) -> tuple[float, ...]:
    known = [run for run in (small, large) if run.loading_s]
    if len(known) < 2:
        # Of one size a sample takes as long as of another.
        return tuple(seconds * micro_batch / run.micro_batch for run in known for seconds in run.loading_s)
    low, high = (sorted(run.loading_s)[len(run.loading_s) // 2] for run in known)
    return (_lerp(low, high, weight),)


# What an operation of the host moves for a number at most: it reads two of 32 bits and writes one. A copy moves one.
_TOUCHED_BYTES, _COPIED_BYTES = 12, 4
_COPIES = ("to_host", "to_device")


def at_world(run: ForeseenRun, replicas: int) -> ForeseenRun:
    """The run with another number of replicas. Its storages stay, and so do not belong to it.

    Tensor parallelism stays as it is. Raises ValueError for more replicas of a run of one: it has no collectives that
    could be scaled.
    """
    if replicas == run.replicas:
        return run
    if run.replicas == 1:
        raise ValueError("a run of one replica does not show what several send to each other")
    share, world = run.replicas / replicas, run.world // run.replicas * replicas
    operations: list[Operation] = []
    moments = []
    for moment, stretch in run.operations_by_moment():
        moments.append(moment._replace(operation=len(operations)))
        for operation in stretch:
            kind = kind_of(operation)
            if kind in COLLECTIVES:
                ranks = operation.ranks
                if run.shares_states(operation):
                    ranks = replicas * run.sequence_ranks
                elif ranks == run.world:
                    # Stages of a pipeline send to each other in the group of all ranks.
                    ranks = world
                if ranks > 1 or operation.ranks == 1:
                    operations.append(operation._replace(ranks=ranks))
            elif _is_of_a_partition(operation, kind, MOMENTS[moment.name], run):
                operations.append(operation.with_work(operation.flops * share, operation.moved * share))
            else:
                operations.append(operation)
    return replace(run, world=world, replicas=replicas, operations=tuple(operations), moments=tuple(moments))


def _is_of_a_partition(operation: Operation, kind: str, moment: str, run: ForeseenRun) -> bool:
    """Whether an operation works on this rank's share of the states: the update, and what is offloaded.

    Stages 1 and 2 move the whole gradient of a parameter that lies in several shares. So what is larger than a share
    stays, whatever the number of ranks.
    """
    if run.stage == 0:
        return False
    if moment == "update":
        return True
    is_offloaded = operation.on_host == 1 or kind in DISK or (kind in _COPIES and moment != "load")
    touched = _COPIED_BYTES if kind in _COPIES else _TOUCHED_BYTES
    return is_offloaded and (not run.parameters or operation.moved <= touched * run.parameters / run.replicas)


_UPDATE, _DEVICE = MOMENTS.index("update"), PLACES.index("device")
# The first ZeRO stage that partitions a kind of state (Rajbhandari et al., ZeRO, arXiv 1910.02054).
_PARTITIONED_FROM = {"optimizer": 1, "gradient": 2, "parameter": 3}


@dataclass(frozen=True)
class ArmRuns:
    arm: PlanArm  # what ran
    small: ForeseenRun  # the run at a small micro-batch
    large: ForeseenRun | None = None  # the same at a larger one; None if the program takes only one size
    # The run at the small micro-batch on another number of ranks; None if there is none
    wider: ForeseenRun | None = None
    names: tuple[str, ...] = ()  # of the runs' files
    _at_sizes: dict[int, ForeseenRun] = field(default_factory=dict, repr=False, compare=False)

    @property
    def runs(self) -> list[ForeseenRun]:
        return [run for run in (self.small, self.large, self.wider) if run is not None]

    def with_loading(self, of_a_sample: float | None, is_beside: bool) -> "ArmRuns":
        """The arm with another loading time (seconds), and whether worker processes load while the rank trains."""

        def changed(run: ForeseenRun) -> ForeseenRun:
            loading = () if of_a_sample is None else (of_a_sample * run.micro_batch,)
            return replace(run, loading_s=loading, loads_beside=is_beside)

        return replace(
            self,
            small=changed(self.small),
            large=None if self.large is None else changed(self.large),
            wider=None if self.wider is None else changed(self.wider),
            _at_sizes={},
        )

    @property
    def stopped(self) -> str:
        return self.small.stopped

    @property
    def is_of_one_size(self) -> bool:
        """Whether nothing is known about other micro-batches."""
        return self.large is None or bool(self.large.stopped)

    def at_replicas(self, replicas: int) -> tuple[ForeseenRun, ForeseenRun | None]:
        """The runs at the small and at the larger micro-batch on a number of replicas of the model."""
        large = None if self.is_of_one_size else self.large
        if replicas == self.small.replicas:
            return self.small, large
        wider = self._wider
        world = self.small.world // self.small.replicas * replicas
        if wider is None:
            return divided_anew(self.small, replicas), None if large is None else divided_anew(large, replicas)
        one = scaled_run(self.small, wider=wider, world=world)
        if large is None:
            return one, None
        if not have_same_events(self.small, large):
            return one, divided_anew(large, replicas)
        other = scaled_run(self.small, larger=large, wider=wider, micro_batch=large.micro_batch, world=world)
        return one, other

    def step_at(self, replicas: int, micro_batch: int, accumulation: int) -> ForeseenRun:
        run = self._at_size(micro_batch)
        if run.replicas != replicas:
            alone = replace(run, replicas=replicas, world=run.world * replicas)
            run = at_world(run, replicas) if run.replicas > 1 else alone
        return replace(run, accumulation=accumulation)

    @cached_property
    def partitioned(self) -> tuple[float, float]:
        """Bytes of the small run's share of partitioned states, on the device and on the host."""
        return partitioned_bytes(self.small)

    def _at_size(self, micro_batch: int) -> ForeseenRun:
        if micro_batch == self.small.micro_batch or self.large is None or self.is_of_one_size:
            return self.small
        if micro_batch not in self._at_sizes:
            self._at_sizes[micro_batch] = at_size(self.small, self.large, micro_batch)
        return self._at_sizes[micro_batch]

    @property
    def _wider(self) -> ForeseenRun | None:
        # The run on another number of ranks, if it differs in sizes alone.
        wider = self.wider
        if wider is None or wider.stopped or wider.world == self.small.world:
            return None
        return wider if have_same_events(self.small, wider) else None


def divided_anew(run: ForeseenRun, replicas: int) -> ForeseenRun:
    """Divides partitioned states over other replicas, by formula. Buffers and what a pass gathers stay."""
    partitioned, share = partitioned_states(run), run.replicas / replicas
    storages = tuple(
        storage._replace(size=round(storage.size * share)) if index in partitioned else storage
        for index, storage in enumerate(run.storages)
    )
    return replace(run, storages=storages, replicas=replicas, world=run.world // run.replicas * replicas)


def partitioned_states(run: ForeseenRun) -> set[int]:
    """The indexes of the storages with this rank's share of states that ZeRO partitions.

    States that are there when the optimizer steps count as partitioned from the stage on that partitions their kind.
    """
    kinds = {KINDS.index(kind) for kind, stage in _PARTITIONED_FROM.items() if run.stage >= stage}
    return {index for index in persistent(run) if run.storages[index].kind in kinds}


def persistent(run: ForeseenRun) -> set[int]:
    """The indexes of the storages that are there when an optimizer steps; at the end of a run without steps."""
    updates = {moment.event for moment in run.moments if moment.name == _UPDATE}
    live: set[int] = set()
    found: set[int] = set()
    for index, event in enumerate(run.events):
        if index in updates:
            found |= live
        if event.is_made:
            live.add(event.storage)
        else:
            live.discard(event.storage)
    return found if updates else live


def partitioned_bytes(run: ForeseenRun) -> tuple[float, float]:
    """One rank's share on device and host. A share that is made anew in each step counts once."""
    most: dict[tuple[int, int], float] = {}
    live: dict[tuple[int, int], float] = {}
    states = partitioned_states(run)
    for event in run.events:
        if event.storage not in states:
            continue
        storage = run.storages[event.storage]
        key = storage.kind, storage.place
        live[key] = live.get(key, 0.0) + (storage.size if event.is_made else -storage.size)
        most[key] = max(most.get(key, 0.0), live[key])
    device = sum(size for (_, place), size in most.items() if place == _DEVICE)
    return device, sum(most.values()) - device


def with_common_loading(arms: Sequence[ArmRuns]) -> list[ArmRuns]:
    """The arms with the same loading time of a sample, which is the median over the runs of all of them.

    Loading is measured, and a run has only a few batches. An arm would otherwise look slow because another process
    disturbed its run. Arms with other switches of the program may load otherwise, so they have a median of their own.
    """
    alike: dict[tuple[tuple[str, str], ...], list[ForeseenRun]] = {}
    for arm in arms:
        alike.setdefault(switch_key(arm.arm.knobs), []).extend(arm.runs)
    return [arm.with_loading(*_of_a_sample(alike[switch_key(arm.arm.knobs)])) for arm in arms]


def _of_a_sample(runs: Sequence[ForeseenRun]) -> tuple[float | None, bool]:
    # The median loading time of a sample, and whether workers load. A few runs may not have shown that.
    beside = [run for run in runs if run.loads_beside]
    seconds = [each / run.micro_batch for run in beside or runs for each in run.loading_s if run.micro_batch]
    return (median(seconds) if seconds else None), bool(beside)
