"""Trials of programs whose sequences are of different lengths: their memory is that of the longest."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from device_fixtures import TRAINER_FLAGS
from training_fixtures import TRIAL_CLASSES

from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow, TrainingSpec
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult

PROGRAMS = Path(__file__).parents[1] / "programs"
LONGEST = 40
PROFILE = {"purpose": Purpose.PROFILE, "micro_batch": 1, "window": StepWindow(1, 1, max_steps=1)}


def profile(trials: Any, *arguments: str, **options: Any) -> TrialResult:
    return completed(trials.run("varied_lengths.py", *arguments, **{**PROFILE, **options}))


def completed(result: TrialResult) -> TrialResult:
    assert result.outcome is Outcome.COMPLETED, result.reason
    return result


def trial(trials: Any, *arguments: str, longest: int | None = LONGEST, **options: Any) -> TrialResult:
    plan = dataclasses.replace(trials.plan("varied_lengths.py", *arguments, **options), longest_sequence=longest)
    return completed(trials.start(plan).result())


def lengths(trials: Any, result: TrialResult) -> list[int]:
    """The length of each micro-batch that rank 0 has trained on."""
    return [int(length) for length in re.findall(r"^length (\d+)$", trials.log(result), re.MULTILINE)]


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_profile_finds_the_longest_sequence_and_that_a_batch_can_be_made_as_long(trials: Any, slots: int) -> None:
    result = profile(trials, slots=slots)
    assert result.program is not None
    assert (result.program.shortest_sequence, result.program.longest_sequence) == (5, LONGEST)
    assert result.program.is_stretchable
    assert LONGEST in lengths(trials, result)


def test_the_profile_of_data_of_one_length_takes_its_step_and_one_for_the_flops(trials: Any) -> None:
    result = profile(trials, "--fixed", "12")
    assert result.program is not None
    assert (result.program.shortest_sequence, result.program.longest_sequence) == (None, None)
    assert lengths(trials, result) == [12, 12]


def test_a_profile_sees_sequences_that_no_loader_gave_while_it_trains(trials: Any) -> None:
    result = profile(trials, "--data", "own")
    assert result.program is not None
    assert result.program.longest_sequence == LONGEST
    assert not result.program.is_stretchable
    # And one whose FLOPs are counted.
    assert len(lengths(trials, result)) == 64 + 1


def test_a_program_whose_batches_cannot_be_made_longer_is_profiled_all_the_same(trials: Any) -> None:
    result = profile(trials, "--data", "own_labels")
    assert result.profile is not None
    assert result.program is not None
    assert result.program.longest_sequence == LONGEST
    assert not result.program.is_stretchable


def test_batches_of_two_loaders_are_made_longer_together(trials: Any) -> None:
    result = profile(trials, "--data", "two_loaders")
    assert result.program is not None
    assert result.program.is_stretchable


def test_data_that_ends_while_it_is_looked_at_is_profiled_all_the_same(trials: Any) -> None:
    result = profile(trials, "--count", "9")
    assert result.program is not None
    assert (result.program.longest_sequence, result.program.is_stretchable) == (LONGEST, True)


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.long), "2"])
def test_the_longest_batch_is_trained_on_once_in_the_warm_up(trials: Any, workers: str) -> None:
    result = trial(trials, "--workers", workers, micro_batch=2)
    assert lengths(trials, result)[:5] == [LONGEST, 8, 10, LONGEST, 7]
    assert (result.longest_sequence, result.note) == (LONGEST, "")


def test_all_micro_batches_of_a_warm_up_step_are_as_long(trials: Any) -> None:
    result = trial(trials, micro_batch=1, accumulation=3)
    assert lengths(trials, result)[:6] == [LONGEST, LONGEST, LONGEST, 8, 9, 10]


def test_a_batch_that_is_validated_on_is_not_made_longer(trials: Any) -> None:
    result = trial(trials, "--data", "validates_first", micro_batch=1)
    assert lengths(trials, result)[:3] == [LONGEST, 6, 7]


def test_the_peak_memory_is_that_of_the_longest_batch(trials: Any) -> None:
    # None of the first 6 sentences is long.
    options: dict[str, Any] = {"micro_batch": 1, "window": StepWindow(2, 4, max_steps=3)}

    def above_initialize(result: TrialResult) -> float:
        return (result.memory.peak[0] - result.memory.after_initialize[0]) / 2**10

    asked = ("--kib_per_token", "4096")
    as_they_come = trial(trials, *asked, longest=None, **options)
    stretched = trial(trials, *asked, **options)
    alike = trial(trials, *asked, "--fixed", str(LONGEST), longest=None, **options)
    assert above_initialize(stretched) == pytest.approx(above_initialize(alike), rel=0.1)
    assert above_initialize(stretched) - above_initialize(as_they_come) > 25 * 4096
    assert stretched.metrics["tokens_per_second"] == pytest.approx(7 * stretched.metrics["throughput"])


def trial_class_plan(trials: Any, **options: Any) -> TrialPlan:
    plan: TrialPlan = trials.plan("unused", model_dir=TRIAL_CLASSES, **options)
    spec = TrainingSpec(
        trial="model_def:VariedLengths",
        hparams={"deepspeed_config": str(plan.paths.ds_config)},
        tensorboard=str(plan.paths.tensorboard),
    )
    program = dataclasses.replace(
        plan.program, target={"module": "zerotune.trial_lib.training"}, arguments=[str(plan.paths.training_spec)]
    )
    return dataclasses.replace(plan, program=program, training_spec=spec)


def trainer_plan(trials: Any, **options: Any) -> TrialPlan:
    plan: TrialPlan = trials.plan("varied_trainer.py", *TRAINER_FLAGS, config_flag="--deepspeed", **options)
    auto = json.loads((PROGRAMS / "any" / "ds_auto.json").read_text())
    return dataclasses.replace(plan, ds_config=plan.candidate.complete(auto))


@pytest.mark.long
@pytest.mark.parametrize("planned", [pytest.param(trial_class_plan, marks=pytest.mark.long), trainer_plan])
def test_trial_classes_and_trainers_are_measured_on_the_longest_batch(trials: Any, planned: Any) -> None:
    found = completed(trials.start(planned(trials, **PROFILE)).result())
    assert found.program is not None
    assert (found.program.longest_sequence, found.program.is_stretchable) == (LONGEST, True)
    plan = dataclasses.replace(
        planned(trials, micro_batch=1, accumulation=2, window=StepWindow(2, 3, max_steps=2)), longest_sequence=LONGEST
    )
    result = completed(trials.start(plan).result())
    seen = lengths(trials, result)
    assert seen[:2] == [LONGEST, LONGEST]
    # The third of a shuffled epoch may be as long.
    assert seen.count(LONGEST) < len(seen)
    assert (result.longest_sequence, result.note) == (LONGEST, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("planned", "samples"), [pytest.param(trial_class_plan, 70, marks=pytest.mark.long), (trainer_plan, 1000)]
)
def test_trial_classes_and_trainers_begin_elsewhere_in_their_data(trials: Any, planned: Any, samples: int) -> None:
    result = completed(trials.start(dataclasses.replace(planned(trials), data_offset=0.5)).result())
    assert (result.data_offset, result.data_places) == (samples // 2, samples)


def test_data_of_one_length_are_left_alone(trials: Any) -> None:
    result = trial(trials, "--fixed", "12", longest=None)
    assert set(lengths(trials, result)) == {12}
    assert result.longest_sequence == 12


def test_a_trial_whose_batches_come_from_nowhere_known_says_what_it_was_measured_on(trials: Any) -> None:
    result = trial(trials, "--data", "own", micro_batch=1, window=StepWindow(2, 4, max_steps=3))
    assert result.longest_sequence == 8
    assert "sequences of 8 tokens, and the data has some of 40" in result.note


def test_the_result_of_a_trial_can_be_read_again(trials: Any) -> None:
    result = trial(trials, micro_batch=1)
    assert TrialResult.from_text((Path(result.logs[0]).parent / "result.json").read_text()) == result
