"""A run of another size, from runs of one program that have the same events.

Between two runs that differ in the micro-batch alone, each storage and each operation is a line in the micro-batch.
Between two that differ in the world alone, each is a line in 1 / world: a rank has a share of what ZeRO partitions, and
all of the rest. The error is the padding of shares, which is below one element for each rank of the world. What is not
such a line makes other events: a world of one rank communicates nothing, and buckets of another number.
"""

from collections.abc import Sequence
from dataclasses import replace

from trial_lib.wire.foreseen_run import ForeseenRun, MemoryEvent, Operation


def have_same_events(one: ForeseenRun, other: ForeseenRun) -> bool:
    """Returns whether two runs allocate and free alike, in the same moments, and differ in sizes alone.

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
    """Returns whether two runs issue the same operations, in the same moments, with other sizes."""
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
    """Returns the run of another micro-batch, of another world, or of both.

    Args:
        base: a run.
        larger: the same with another micro-batch; needed for `micro_batch`.
        wider: the same with another world; needed for `world`.
        micro_batch: samples. Default: those of `base`.
        world: ranks. Default: those of `base`.

    Raises:
        ValueError: a run that is needed is missing, equals `base` in size, or has other events.
    """
    steps: list[tuple[ForeseenRun, float]] = []
    if micro_batch is not None and micro_batch != base.micro_batch:
        other = _needed(base, larger, "micro_batch")
        between = other.micro_batch - base.micro_batch
        steps.append((other, (micro_batch - base.micro_batch) / _nonzero(between, "micro_batch")))
    if world is not None and world != base.world:
        other = _needed(base, wider, "world")
        between_worlds = 1 / other.world - 1 / base.world
        steps.append((other, (1 / world - 1 / base.world) / _nonzero(between_worlds, "world")))
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
    """Returns the operations; none if they differ in more than their sizes."""
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


def _needed(base: ForeseenRun, other: ForeseenRun | None, name: str) -> ForeseenRun:
    if other is None:
        raise ValueError(f"another {name} needs a second run")
    return other


def _nonzero(between: float, name: str) -> float:
    if not between:
        raise ValueError(f"the two runs have the same {name}")
    return between
