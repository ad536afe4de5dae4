"""A foreseen run at a micro-batch size that was not run, from two that were. Pure.

The work of an operation is linear in the micro-batch. Two runs of one arm give the line of each operation.
"""

from collections.abc import Sequence
from dataclasses import replace

from trial_lib.wire.foreseen_run import ForeseenRun, Moment, Operation


def at_size(small: ForeseenRun, large: ForeseenRun, micro_batch: int, accumulation: int | None = None) -> ForeseenRun:
    """Returns the run of the arm with another micro-batch. Its storages are those of the nearer run.

    Operations are matched one to one by their order within a moment. If a moment has other operations at the larger
    size, the nearer run's are scaled by the sums of their class. If one run has more micro-batches in a step, its last
    ones count.

    Args:
        small: a run of the arm.
        large: a run of it with a larger micro-batch.
        micro_batch: samples, at least 1.
        accumulation: micro-batches of a step; that of the nearer run if None.

    Raises:
        ValueError: both runs have the same micro-batch.
    """
    if small.micro_batch == large.micro_batch:
        raise ValueError(f"both runs have a micro-batch of {small.micro_batch}")
    small, large = _with_as_many(small, large), _with_as_many(large, small)
    weight = (micro_batch - small.micro_batch) / (large.micro_batch - small.micro_batch)
    nearer = large if weight > 0.5 else small
    operations: list[Operation] = []
    starts: list[int] = []
    if len(small.moments) == len(large.moments):
        for low, high, near in zip(*(_stretches(run) for run in (small, large, nearer)), strict=True):
            starts.append(len(operations))
            operations += _between(low, high, near, weight)
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
    """Returns the operations of a run with at most as many micro-batches in a step as another run has."""
    most = max((moment.micro_batch for moment in other.moments), default=0)
    last: dict[int, int] = {}
    for moment in run.moments:
        last[moment.step] = max(last.get(moment.step, 0), moment.micro_batch)
    if max(last.values(), default=0) <= most:
        return run
    moments: list[Moment] = []
    operations: list[Operation] = []
    for moment, stretch in run.operations_by_moment():
        if moment.micro_batch >= last[moment.step] - most:
            moments.append(moment._replace(operation=len(operations)))
            operations += stretch
    return replace(run, moments=tuple(moments), operations=tuple(operations))


def _stretches(run: ForeseenRun) -> list[tuple[Operation, ...]]:
    return [operations for _, operations in run.operations_by_moment()]


def _between(
    low: Sequence[Operation], high: Sequence[Operation], near: Sequence[Operation], weight: float
) -> list[Operation]:
    if [_sort(each) for each in low] == [_sort(each) for each in high]:
        return [
            near_by.with_work(_line(one.flops, other.flops, weight), _line(one.moved, other.moved, weight))
            for one, other, near_by in zip(low, high, near, strict=True)
        ]
    sums = [_sums(each) for each in (low, high, near)]
    factors = {
        sort: tuple(
            _line(sums[0].get(sort, (0.0, 0.0))[part], sums[1].get(sort, (0.0, 0.0))[part], weight) / (own[part] or 1.0)
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


def _line(low: float, high: float, weight: float) -> float:
    # Below the smaller size a line may cross zero.
    return max(0.0, low + (high - low) * weight)


def _loading(small: ForeseenRun, large: ForeseenRun, micro_batch: int, weight: float) -> tuple[float, ...]:
    known = [run for run in (small, large) if run.loading_s]
    if len(known) < 2:
        # Of one size a sample takes as long as of another.
        return tuple(seconds * micro_batch / run.micro_batch for run in known for seconds in run.loading_s)
    low, high = (sorted(run.loading_s)[len(run.loading_s) // 2] for run in known)
    return (_line(low, high, weight),)
