"""Precision: fp16 with loss scaling, bf16 and autocast train in trials, and their losses are the program's own."""

import math
from typing import Any

from benchmarks.gpu.kit import Kit
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.loss_agreement import LossCourse, compare

WINDOW = StepWindow(start_step=3, end_step=12, max_steps=12)
FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
# At stage 0 DeepSpeed takes no `backward` but its own.
STAGE_1 = {"zero_optimization": {"stage": 1}}
# The loss of a model that has learnt nothing is that of a guess among all tokens.
MOST_FROM_GUESS = 0.15


def run(kit: Kit) -> None:
    plain = {key: value for key, value in kit.config().items() if key not in ("bf16", "fp16")}
    cases: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "float32": (plain, ()),
        "bf16": (plain | BF16, ()),
        "autocast in the code": (plain, ("--autocast",)),
        "bfloat16 parameters in the code": (plain, ("--dtype", "bfloat16")),
        "bf16, backward of the loss itself": (plain | BF16 | STAGE_1, ("--backward", "loss")),
    }
    if kit.is_cuda:
        cases |= {
            "fp16, engine.backward": (plain | FP16, ()),
            "fp16, engine.scale(loss).backward()": (plain | FP16 | STAGE_1, ("--backward", "scale")),
        }
    else:
        kit.report.leave_out("fp16", "DeepSpeed refuses it on a processor")
    for name, (config, options) in kit.part_of(cases.items()):
        one(kit, name, config, options)


def one(kit: Kit, name: str, config: dict[str, Any], options: tuple[str, ...]) -> None:
    shape, report = kit.shape("125m"), kit.report
    profile = kit.run(shape, *options, config=config, purpose=Purpose.PROFILE, window=StepWindow(1, 1, 1))
    formats = () if profile.program is None else profile.program.formats
    report.figure(f"{name}: formats", list(formats))
    sizes = {size: 8 // size for size in (8, 4)}
    trained: dict[int, TrialResult] = {}
    for size, accumulation in sizes.items():
        result = kit.run(shape, *options, config=config, micro_batch=size, accumulation=accumulation, window=WINDOW)
        if report.check(f"{name}, micro-batch {size}", result.outcome is Outcome.COMPLETED, result.reason):
            trained[size] = result
    if not trained:
        return
    report.figure(f"{name}: losses", {size: result.losses for size, result in trained.items()})
    guess = math.log(shape.vocabulary)
    first = next(iter(trained.values())).losses
    is_near = bool(first) and abs(first[0] / guess - 1) < MOST_FROM_GUESS
    report.check(f"{name}: the first loss is that of a guess", is_near, f"{first[:1]} beside {guess:.3f}")
    if len(trained) < len(sizes):
        return
    courses = [
        LossCourse(
            Candidate(micro_batch_size=size, gradient_accumulation_steps=sizes[size], slots=1, data_parallel_size=1),
            config,
            [result.losses],
            formats=tuple(formats),
        )
        for size, result in trained.items()
    ]
    found = compare(*courses)
    report.check(f"{name}: both batches train alike", found.agrees, found.sentence)
