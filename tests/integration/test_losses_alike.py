"""First steps of real ranks that are compared: losses, however a program reduces them, and what updates change."""

import dataclasses
from typing import Any

import pytest
from case_fixtures import quick_first

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.study.loss_agreement import LossAgreement, LossCourse, compare
from zerotune.trial_lib.study.weight_changes import FirstUpdates

SHORT = StepWindow(start_step=3, end_step=8, max_steps=6)


def agreement(trials: Any, script: str, *arguments: str, own: dict[str, Any], other: dict[str, Any]) -> LossAgreement:
    """Runs a program in two ways, on two ranks, and compares the second with the first."""
    courses = []
    for options in (own, other):
        plan = trials.plan(script, *arguments, slots=2, window=SHORT, **options)
        result = trials.start(plan).result()
        assert result.outcome == "completed", result.reason
        assert len(result.losses) == 8
        assert len(result.initial_weights) == 2
        candidate = Candidate(
            micro_batch_size=options["micro_batch"], gradient_accumulation_steps=options.get("accumulation", 1), slots=2
        )
        courses.append(LossCourse(candidate, plan.ds_config, [result.losses], [result.initial_weights]))
    return compare(*courses)


HOW = ["mean", "undivided", "sum", "divided", "divided_twice"]


@pytest.mark.parametrize("reduction", quick_first(1, HOW))
def test_a_program_s_own_way_to_reduce_its_losses_is_no_difference_of_the_candidate(
    trials: Any, reduction: str
) -> None:
    own, other = {"micro_batch": 2, "accumulation": 4}, {"micro_batch": 4, "accumulation": 2}
    found = agreement(trials, "own_reduction.py", "--reduction", reduction, own=own, other=other)
    assert (found.is_compared, found.agrees) == (True, True), found.sentence
    factor = {"sum": 2.0, "undivided": 0.5, "divided_twice": 2.0}.get(reduction)
    assert found.sentence.startswith("the losses of the first 8 steps agree")
    assert (factor is None) == ("factor" not in found.sentence)
    assert factor is None or f"but for the factor {factor:g}," in found.sentence


@pytest.mark.long
def test_a_model_made_within_zero_init_may_start_from_other_weights_at_stage_3(trials: Any) -> None:
    own, other = ({"micro_batch": 4, "zero": {"stage": stage}} for stage in (3, 1))
    found = agreement(trials, "partitioned_init.py", own=own, other=other)
    assert found.agrees, found.sentence
    assert found.sentence.startswith("the program's initial weights are others than with your configuration (loss ")


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_same_weights_are_known_as_such_however_they_are_partitioned(trials: Any, stage: int) -> None:
    own, other = ({"micro_batch": 4, "zero": {"stage": each}} for each in (1, stage))
    found = agreement(trials, "own_reduction.py", own=own, other=other)
    assert found.sentence.startswith("the losses of the first 8 steps agree; ")


BF16 = {"bf16": {"enabled": True}}


def weighed(trials: Any, rounding: float | None = None, rate: float = 1e-3, **options: Any) -> tuple[TrialResult, Any]:
    """Trains in bfloat16 on two ranks, as a confirming trial."""
    plan = trials.plan("half_by_code.py", "--how", "nowhere", slots=2, window=SHORT, **options)
    optimizer = {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}}
    config = {**plan.ds_config, **BF16, "optimizer": optimizer}
    result = trials.start(dataclasses.replace(plan, ds_config=config, weighs=True, rounding=rounding)).result()
    assert result.outcome == "completed", result.reason
    change = result.weight_change
    assert change is not None
    assert change.modules == ["layers.0", "layers.2"]
    assert change.seconds < 1.0
    assert all(norm > 0.0 for norm in result.gradient_norms)
    course = LossCourse(
        plan.candidate, config, [result.losses], [result.initial_weights], updates=[FirstUpdates.of(result)]
    )
    return result, course


def test_a_training_that_stands_still_in_16_bits_is_found_out_and_one_at_another_stage_is_not(trials: Any) -> None:
    kept: dict[str, Any] = {"micro_batch": 4, "accumulation": 2, "zero": {"stage": 1}}
    (mine, own), (again, _) = (weighed(trials, rounding, **kept) for rounding in (None, 2.0**-8))
    _, other = weighed(trials, micro_batch=8, zero={"stage": 3})
    _, stands = weighed(trials, rate=0.0, micro_batch=8, zero={"stage": 2})
    alike = compare(own, other, (mine, again))
    assert alike.agrees, alike.sentence
    assert alike.seen is not None
    assert alike.seen[0] < 0.5
    assert "the gradients and the change of the weights after 3 updates agree too: a difference of " in alike.sentence
    fault = compare(own, stands, (mine, again))
    assert not fault.agrees
    assert "the changes of the weights are 100 % apart (" in fault.sentence
