"""The operations of a compiled model: those that inductor fuses are one pass over the memory. Pure.

Inductor makes one kernel of pointwise operations and reductions that follow each other (Ansel et al., PyTorch 2, ASPLOS
2024, section 4). It reads its inputs once and writes its outputs once. A foreseen run has the bytes of each operation,
and not which tensor an operation reads. So a fused kernel is taken for as many bytes as its largest operation moves. It
may move more, up to what the operations move together.
"""

from collections.abc import Sequence
from dataclasses import replace

from trial_lib.command.switches import switches_of
from trial_lib.foresee.time.work import kind_of
from trial_lib.wire.foreseen_run import MOMENTS, ForeseenRun, Moment, Operation
from trial_lib.wire.turned import compiles

# Of the classes in `OPERATIONS`. Products, attention and embeddings are kernels of their own.
_FUSIBLE = ("norm", "elementwise", "reduction", "copy", "loss")
_COMPILED_MOMENTS = ("forward", "backward")


def is_compiled(run: ForeseenRun) -> bool:
    """Returns whether a switch in the configuration of a run compiles the model. The run itself is as written."""
    return compiles(switches_of(run.ds_config))


def fused(run: ForeseenRun) -> ForeseenRun:
    """Returns a run with one operation for all that inductor may fuse. Its storages and events stay.

    At stage 3 DeepSpeed gathers the parameters of each module in hooks, which no kernel crosses.
    """
    operations: list[Operation] = []
    moments: list[Moment] = []
    for moment, stretch in run.operations_by_moment():
        moments.append(moment._replace(operation=len(operations)))
        is_compiled_there = MOMENTS[moment.name] in _COMPILED_MOMENTS
        operations += _fused(stretch, run.stage == 3) if is_compiled_there else stretch
    return replace(run, operations=tuple(operations), moments=tuple(moments))


def _fused(stretch: Sequence[Operation], within_modules: bool) -> list[Operation]:
    kernels: list[Operation] = []
    before: Operation | None = None
    for operation in stretch:
        joins = (
            before is not None
            and _is_fusible(before)
            and _is_fusible(operation)
            and (operation.where == before.where or not within_modules)
        )
        if joins:
            last = kernels[-1]
            larger = max(last, operation, key=lambda each: each.moved)
            kernels[-1] = larger._replace(flops=last.flops + operation.flops, where=last.where)
        else:
            kernels.append(operation)
        before = operation
    return kernels


def _is_fusible(operation: Operation) -> bool:
    return kind_of(operation) in _FUSIBLE and not operation.on_host
