"""The step of a model with many layers, from the step of one with few. Pure.

The layers of a transformer are alike, so the longest stretch of products and norms that repeats itself is its layers.
Further layers come into the middle, in turn like each of those that are there. ZeRO's buckets do not end where a layer
ends, so the bytes of reductions follow from the parameters.
"""

from collections.abc import Sequence
from dataclasses import replace

from zerotune.trial_lib.messages.foreseen_run import MOMENTS, ForeseenRun, Moment, Operation
from zerotune.trial_lib.plan.step_time import kind_of

_MARKS = ("matmul", "attention", "whole_attention", "norm")
_REDUCED = ("all_reduce", "reduce_scatter", "to_host")


def with_layers(run: ForeseenRun, few: int, layers: int, of_layer: float) -> ForeseenRun:
    """Returns the run of a model with more layers.

    Args:
        run: of one step.
        few: layers of its model, 3 or more. The difference to `layers` is a multiple of the layers that make a period.
        layers: of the other model.
        of_layer: parameters of a layer.

    Raises:
        ValueError: no stretch of a pass repeats itself as often as there are layers.
    """
    if layers == few:
        return run
    ratio = (run.parameters + (layers - few) * of_layer) / run.parameters
    operations: list[Operation] = []
    moments: list[Moment] = []
    for moment, stretch in run.operations_by_moment():
        moments.append(moment._replace(operation=len(operations)))
        name = MOMENTS[moment.name]
        if name == "update":
            operations += [each._replace(flops=each.flops * ratio, moved=each.moved * ratio) for each in stretch]
        elif name in ("forward", "backward"):
            longer = _longer(stretch, few, layers)
            operations += longer if name == "forward" else _reducing(longer, stretch, ratio, run.replicas)
        else:
            operations += stretch
    return replace(
        run,
        parameters=round(run.parameters * ratio),
        trainable=round(run.trainable * ratio),
        moments=tuple(moments),
        operations=tuple(operations),
    )


def period_of(operations: Sequence[Operation]) -> tuple[int, int, int]:
    """Returns the longest stretch that repeats itself: its begin, its period and its repetitions.

    Products and norms alone count, because each layer copies other pieces of ZeRO's buckets.
    """
    shapes: dict[tuple[float, ...], int] = {}
    done = [shapes.setdefault(each[:4], len(shapes)) for each in operations if kind_of(each) in _MARKS]
    best = (0, 0, 0)
    for period in range(1, len(done) // 2 + 1):
        length = begin = 0
        for index in range(len(done) - period + 1):
            if index < len(done) - period and done[index] == done[index + period]:
                begin, length = (begin, length + 1) if length else (index, 1)
                continue
            times = (length + period) // period
            if times > 1 and times * period > best[1] * best[2]:
                best = (begin, period, times)
            length = 0
    return best


def _longer(stretch: Sequence[Operation], few: int, layers: int) -> list[Operation]:
    begin, period, times = period_of(stretch)
    # The first or the last layer may differ from the others, and a period may have several layers.
    in_period = max(1, round(few / (times + 0.5))) if times else 0
    if not in_period or (layers - few) % in_period or in_period * times > few:
        raise ValueError(f"{few} layers show {times} repetitions")
    pieces = _cut(stretch, [begin + index * period for index in range(times + 1)])
    inner = pieces[2:-2] or pieces[1:-1]
    added = [inner[index % len(inner)] for index in range((layers - few) // in_period)]
    return [each for piece in (*pieces[:2], *added, *pieces[2:]) for each in piece]


def _cut(run: Sequence[Operation], places: Sequence[int]) -> list[list[Operation]]:
    """Cuts a pass before some of its products and norms."""
    pieces: list[list[Operation]] = [[] for _ in range(len(places) + 1)]
    count = 0
    for operation in run:
        is_mark = kind_of(operation) in _MARKS
        pieces[sum(place <= count for place in places) if is_mark else sum(place < count for place in places)].append(
            operation
        )
        count += is_mark
    return pieces


def _reducing(longer: list[Operation], stretch: Sequence[Operation], ratio: float, replicas: int) -> list[Operation]:
    """Multiplies reductions of gradients, so that their bytes grow as the parameters do."""

    def reduced(operations: Sequence[Operation]) -> float:
        return sum(each.moved for each in operations if _reduces(each, replicas))

    found = reduced(longer)
    factor = reduced(stretch) * ratio / found if found else 1.0
    return [each._replace(moved=each.moved * factor) if _reduces(each, replicas) else each for each in longer]


def _reduces(operation: Operation, replicas: int) -> bool:
    return kind_of(operation) in _REDUCED and operation.ranks in (1, replicas)
