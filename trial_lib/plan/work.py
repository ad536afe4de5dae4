"""The operations of one optimizer step, cut out of a foreseen run. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun, Operation
from trial_lib.plan.devices import ON_MATRIX_UNITS


@dataclass(frozen=True)
class Stretch:
    moment: str  # a name of `MOMENTS`
    operations: tuple[Operation, ...]  # in order
    micro_batch: int = 0  # of the step, from 0


@dataclass(frozen=True)
class StepWork:
    repeated: tuple[Stretch, ...]  # a micro-batch that stands for several alike
    times: int  # how often it comes
    last: tuple[Stretch, ...]  # what comes after that, with the update


@dataclass(frozen=True)
class ZeroTimes:
    stage: int  # the ZeRO stage
    overlaps: bool  # whether reductions and gathers have a stream of their own
    prefetched: float  # parameters that stage 3 gathers ahead
    pins_optimizer: bool  # whether offloaded states are in locked pages
    pins_params: bool  # likewise for parameters

    @classmethod
    def of(cls, stage: int, ds_config: Mapping[str, Any]) -> "ZeroTimes":
        """Reads a DeepSpeed configuration, with the defaults of `deepspeed/runtime/zero/config.py` (0.19.8)."""
        zero = ds_config.get("zero_optimization") or {}
        overlaps = zero.get("overlap_comm")
        prefetched = zero.get("stage3_prefetch_bucket_size", zero.get("prefetch_bucket_size"))
        optimizer, params = (zero.get(f"offload_{each}") or {} for each in ("optimizer", "param"))
        return cls(
            stage=stage,
            overlaps=stage == 3 if overlaps is None else bool(overlaps),
            prefetched=float(prefetched) if isinstance(prefetched, (int, float)) else 5e7,
            pins_optimizer=bool(optimizer.get("pin_memory", False)),
            pins_params=bool(params.get("pin_memory", False)),
        )


def step_of(run: ForeseenRun) -> StepWork:
    """The last whole step of a run, with all of its micro-batches.

    A run may show fewer micro-batches than a step has. Then its first stands for the missing ones, because the last
    also reduces what earlier ones left. Of three or more it is the second. If the first is the last, it stands for them
    without what stages 0 and 1 reduce at the end of a step. If a run shows too many, the first are left out. Raises
    ValueError if the run has no step.
    """
    whole = {moment.step for moment in run.moments if MOMENTS[moment.name] == "update" and moment.step > 0}
    steps = whole or {moment.step for moment in run.moments if moment.step > 0}
    if not steps:
        raise ValueError("the foreseen run has no optimizer step")
    last = [
        Stretch(MOMENTS[moment.name], operations, moment.micro_batch)
        for moment, operations in run.operations_by_moment()
        if moment.step == max(steps)
    ]
    shown = sorted({each.micro_batch for each in last})
    lacking = run.accumulation - len(shown)
    if lacking <= 0:
        kept = shown[-run.accumulation :]
        return StepWork((), 0, tuple(each for each in last if each.micro_batch in kept))
    # In a pipeline the second also adds to gradients, as all but the first do.
    repeated = shown[1] if len(shown) > 2 else shown[0]
    first = [each for each in last if each.micro_batch == repeated and each.moment != "update"]
    if len(shown) == 1 and run.stage < 2:
        first = [replace(each, operations=_without_reductions(each.operations, run)) for each in first]
    return StepWork(tuple(first), lacking, tuple(last))


def _without_reductions(operations: tuple[Operation, ...], run: ForeseenRun) -> tuple[Operation, ...]:
    kinds = ("all_reduce", "reduce_scatter", "broadcast", "to_host")
    return tuple(each for each in operations if kind_of(each) not in kinds or each.ranks not in (1, run.zero_ranks))


def loading_seconds(run: ForeseenRun) -> float:
    """The usual seconds to fetch a micro-batch, measured on the host that foresaw."""
    return statistics.median(run.loading_s) if run.loading_s else 0.0


def model_flops(run: ForeseenRun) -> float:
    """The model FLOPs of a step on one rank.

    Activations that are computed a second time do not count. If all is trained, a backward pass has twice the work of
    the forward pass. More than that is taken for such repetition.
    """
    work = dict.fromkeys(("forward", "backward"), 0.0)
    step = step_of(run)
    for stretches, times in ((step.repeated, step.times), (step.last, 1)):
        for stretch in stretches:
            if stretch.moment in work:
                work[stretch.moment] += times * sum(each.flops for each in stretch.operations)
    return work["forward"] + min(work["backward"], 2 * work["forward"])


def multiplied_in(run: ForeseenRun) -> str | None:
    """The number format of most FLOPs of matrices in a step; None without any, and for 64 bits."""
    flops: dict[int, float] = {}
    for stretch in step_of(run).last:
        for each in stretch.operations:
            if kind_of(each) in ON_MATRIX_UNITS:
                flops[each.dtype] = flops.get(each.dtype, 0.0) + each.flops
    most = run.dtypes[max(flops, key=lambda dtype: flops[dtype])] if flops and run.dtypes else None
    return None if most == "float64" else most


def kind_of(operation: Operation) -> str:
    return OPERATIONS[operation.kind]


def visits(operations: Sequence[Operation]) -> int:
    return sum(one.where != other.where for one, other in pairwise(operations))
