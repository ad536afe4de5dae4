"""The profile trial on real ranks: what it learns from the program as typed, and at which size it profiles."""

import dataclasses
import json

import pytest
from conftest import CONFIG, Trials

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.measurement import BatchSizes, ProgramProfile
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.profile import profile_candidates, run_profile

ONE_STEP = StepWindow(1, 1, max_steps=1)


def profiled(
    trials: Trials,
    *arguments: str,
    script: str = "batch_shapes.py",
    micro_batch: int = 8,
    slots: int = 1,
    **options: int,
) -> TrialResult:
    """Runs a profile trial of a program, typed with a micro-batch size and two accumulation steps."""
    plan = trials.plan(
        script, *arguments, slots=slots, window=ONE_STEP, purpose=Purpose.PROFILE, micro_batch=1, **options
    )
    own = {**CONFIG, MICRO_BATCH: micro_batch, ACCUMULATION: 2}
    folder = trials.root / "own"
    folder.mkdir()
    (folder / "ds_config.json").write_text(json.dumps(own))
    program = plan.program
    given = [program.arguments[0], str(folder / "ds_config.json"), *program.arguments[2:]]
    typed = dataclasses.replace(
        plan, paths=plan.paths.as_typed, as_typed=True, program=dataclasses.replace(program, arguments=given)
    )

    def plans_for(program: ProgramProfile, size: int) -> list[TrialPlan]:
        (candidate,) = profile_candidates(program, size, slots, types_batch=False)
        config = candidate.complete(own)
        return [dataclasses.replace(plan, candidate=candidate, ds_config=config, arrival=program.arrival)]

    return run_profile(plan, typed, plans_for, lambda each: trials.start(each).result(), lambda modules: None)


def size_of(trials: Trials, result: TrialResult) -> int:
    folder = trials.root / f"{result.number:04d}"
    return Candidate.model_validate_json((folder / "candidate.json").read_text()).micro_batch_size


# Sequences of 8 tokens are as long as there are samples.
@pytest.mark.parametrize(
    ("kind", "length", "rows", "dimension"),
    [
        pytest.param("pairs", 9, 2, 0, marks=pytest.mark.long),
        ("pairs", 8, 2, 0),
        pytest.param("packed", 9, 0, 0, marks=pytest.mark.long),
        ("sequence_first", 16, 1, 1),
    ],
)
def test_what_a_sample_is_in_rows_is_seen_as_typed_and_holds_in_the_profile(
    trials: Trials, kind: str, length: int, rows: int, dimension: int
) -> None:
    result = profiled(trials, "--kind", kind, "--length", str(length))
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.program is not None
    assert result.program.typed_batch == BatchSizes(16, 8, 2)
    assert (result.program.rows_per_sample, result.program.batch_dimension) == (rows, dimension)
    assert not result.program.batch_varies
    assert size_of(trials, result) == result.micro_batch_arrived == 1
    assert result.metrics["throughput"] == pytest.approx(2 / result.metrics["latency"])


def test_a_size_that_stays_as_typed_is_profiled_with_what_would_change_it(trials: Trials) -> None:
    result = profiled(trials, "--batch_size", "8", script="ignores_batch.py")
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.program is not None
    assert "--map train_micro_batch_size_per_gpu=--batch_size" in result.program.fixed_batch
    assert size_of(trials, result) == result.micro_batch_arrived == 8


# The first sentences are 8 tokens long.
@pytest.mark.parametrize("micro_batch", [pytest.param(1, marks=pytest.mark.long), 8])
def test_batches_by_a_budget_are_seen_to_vary_and_counted_as_they_arrive(trials: Trials, micro_batch: int) -> None:
    result = profiled(trials, "--kind", "budget", micro_batch=micro_batch)
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.program is not None
    assert result.program.batch_varies
    # The first optimizer step takes sentences of 8 and of 12 tokens, of which 12 and 8 are within the budget.
    assert result.metrics["throughput"] == pytest.approx(20 / result.metrics["latency"])
    window = StepWindow(1, 2, max_steps=2)
    plan = trials.plan("batch_shapes.py", "--kind", "budget", micro_batch=micro_batch, accumulation=2, window=window)
    told = trials.start(dataclasses.replace(plan, arrival=result.program.arrival)).result()
    assert told.outcome is Outcome.COMPLETED, told.reason
    # 12 + 8 samples in the first step, 4 + 2 in the second.
    assert told.metrics["throughput"] == pytest.approx(13 / told.metrics["latency"])


def test_a_trial_that_is_not_told_that_batches_vary_takes_them_for_batches_that_do_not_follow(trials: Trials) -> None:
    result = trials.run("batch_shapes.py", "--kind", "budget", micro_batch=1, accumulation=2)
    assert result.outcome is Outcome.INVALID


@pytest.mark.long
def test_steps_that_do_not_follow_the_accumulation_are_no_candidates(trials: Trials) -> None:
    ran = ("--kind", "plain", "--accumulate", "2")
    result = profiled(trials, *ran)
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.program is not None
    assert result.program.micro_batches_per_step == 2
    for accumulation, outcome in ((2, Outcome.COMPLETED), (4, Outcome.INVALID)):
        plan = trials.plan("batch_shapes.py", *ran, micro_batch=4, accumulation=accumulation, window=ONE_STEP)
        found = trials.start(dataclasses.replace(plan, arrival=result.program.arrival)).result()
        assert found.outcome is outcome, found.reason
    assert "an optimizer step after 2 micro-batches, but its engine was set to an accumulation of 4" in found.reason


@pytest.mark.parametrize(
    ("kind", "smallest"), [pytest.param("two_at_least", 2, marks=pytest.mark.long), ("four_at_least", 4)]
)
def test_a_model_that_needs_several_samples_is_profiled_at_the_smallest_size_that_works(
    trials: Trials, kind: str, smallest: int
) -> None:
    result = profiled(trials, "--kind", kind)
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert size_of(trials, result) == smallest
    assert result.profile is not None
    assert result.profile.activation_mem_per_gpu > 0


def test_what_was_typed_is_known_also_where_it_does_not_fit(trials: Trials) -> None:
    result = profiled(trials, "--kind", "plain", micro_batch=2**22, memory_limit=900 * 2**20)
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.program is not None
    assert result.program.typed_batch == BatchSizes(2**23, 2**22, 2)
    assert size_of(trials, result) == 1


def test_a_batch_that_the_program_sets_before_it_trains_is_what_was_typed(trials: Trials) -> None:
    result = profiled(trials, "--first", "64", script="changes_batch.py")
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.program is not None
    assert result.program.typed_batch == BatchSizes(64, 8, 8)
