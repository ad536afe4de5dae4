"""Switches: what checkpointing, compilation and attention cost and save if ZeroTune turns them in a program."""

import importlib.util
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit import Kit, Shape
from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.messages.turned import ATTENTION, CHECKPOINTING, COMPILE
from zerotune.trial_lib.records.result import TrialResult

WINDOW = StepWindow(start_step=3, end_step=12, max_steps=30)
HUGGING_FACE = Path(__file__).resolve().parents[3] / "tests" / "programs" / "turned"
COMPILED_DEADLINE_S = 280.0
# Losses of the first steps, as a share of the loss: kernels of 16 bits round otherwise.
MOST_OFF_LOSS = 0.02
CASES: dict[str, dict[str, Any]] = {
    "as typed": {},
    "every second block": {CHECKPOINTING: "every_second"},
    "all blocks": {CHECKPOINTING: "full"},
    "compiled": {COMPILE: True},
    "compiled, all blocks": {COMPILE: True, CHECKPOINTING: "full"},
}


def run(kit: Kit) -> None:
    shape, size = kit.shape("125m"), 8 if kit.is_cuda else 2
    found = {name: one(kit, name, plan_of(kit, shape, size, turned)) for name, turned in CASES.items()}
    own = found["as typed"]
    if own is None:
        return
    for name, result in found.items():
        if result is not None and result is not own:
            alike(kit, name, own, result)
    kept = [found[name] for name in ("as typed", "every second block", "all blocks")]
    above = [max(each.memory.above_initialize) for each in kept if each is not None]
    is_less = len(above) == len(kept) and above[0] > above[1] > above[2]
    told = f"{[round(each / 2**20) for each in above]} MiB above initialisation"
    if kit.is_cuda:
        kit.report.check("recomputed blocks take less memory", is_less, told)
    else:
        kit.report.leave_out("recomputed blocks take less memory", f"a toy on a processor: {told}")
    attention(kit, size)


def plan_of(kit: Kit, shape: Shape, size: int, turned: dict[str, Any]) -> TrialPlan:
    deadline = COMPILED_DEADLINE_S if COMPILE in turned else 150.0
    return replace(kit.plan(shape, micro_batch=size, window=WINDOW, deadline_s=deadline), turned=turned)


def attention(kit: Kit, size: int) -> None:
    """Compares the attention functions of a Hugging Face model."""
    if importlib.util.find_spec("transformers") is None:
        kit.report.leave_out("attention", "transformers is not installed")
        return
    found: dict[str, TrialResult | None] = {}
    names = ["sdpa", "eager"]
    if kit.is_cuda and importlib.util.find_spec("flash_attn") is not None:
        names.append("flash_attention_2")
    for name in names:
        plan = plan_of(kit, kit.shape("125m"), size, {ATTENTION: name})
        words = ["--deepspeed_config", str(plan.paths.ds_config)]
        program = replace(plan.program, model_dir=HUGGING_FACE, arguments=words)
        found[name] = one(kit, f"attention {name}", replace(plan, program=program))
    for name in names[1:]:
        own, other = found["sdpa"], found[name]
        if own is not None and other is not None:
            alike(kit, f"attention {name}", own, other)


def one(kit: Kit, name: str, plan: TrialPlan) -> TrialResult | None:
    """Runs a trial; returns its result if it has completed."""
    (result,) = kit.sweep([plan])
    is_measured = isinstance(result, TrialResult) and bool(result.metrics)
    if not kit.report.check(f"{name}: measured", is_measured, str(getattr(result, "reason", result))):
        return None
    figures = [statistics.median(result.step_times), max(result.memory.above_initialize), sum(result.phases.values())]
    kit.report.figure(f"{name}: seconds a step, bytes above initialisation, seconds of the trial", figures)
    return result if isinstance(result, TrialResult) else None


def alike(kit: Kit, name: str, own: TrialResult, other: TrialResult) -> None:
    """Compares the losses of the steps that both have taken, and notes how their times compare."""
    pairs = list(zip(own.losses, other.losses, strict=False))
    off = max((abs(theirs / ours - 1) for ours, theirs in pairs), default=1.0)
    kit.report.check(f"{name}: losses agree", off < MOST_OFF_LOSS, f"{off:.2%} apart at most in {len(pairs)} steps")
    times = [statistics.median(each.step_times) for each in (own, other)]
    kit.report.figure(f"{name}: time of a step beside that as typed", round(times[1] / times[0], 3))
