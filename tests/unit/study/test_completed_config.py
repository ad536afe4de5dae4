"""What was found in the code completes the DeepSpeed configuration."""

from trial_lib.experiment.overrides import ACCUMULATION, MICRO_BATCH
from trial_lib.experiment.result import ProgramProfile
from trial_lib.study.completed_config import completed_config, contradiction

TRAINER = ProgramProfile(batch={MICRO_BATCH: 8, ACCUMULATION: 2})


def test_auto_is_what_the_training_arguments_say() -> None:
    config = {MICRO_BATCH: "auto", ACCUMULATION: "auto", "train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    assert completed_config(config, TRAINER, {}) == {MICRO_BATCH: 8, ACCUMULATION: 2, "bf16": {"enabled": "auto"}}


def test_what_was_typed_counts_more_than_what_the_profile_trial_was_given() -> None:
    assert completed_config({MICRO_BATCH: "auto"}, TRAINER, {MICRO_BATCH: 4})[MICRO_BATCH] == 4


def test_a_configuration_in_the_code_is_the_users_own_without_a_tuning_key() -> None:
    program = ProgramProfile(ds_config={MICRO_BATCH: 2, "autotuning": {"enabled": True}})
    assert completed_config({}, program, {}) == {MICRO_BATCH: 2}


def test_training_arguments_that_contradict_the_configuration_are_named_with_both_values() -> None:
    said = contradiction({ACCUMULATION: 4, MICRO_BATCH: 8}, TRAINER, {})
    assert said is not None
    assert "gradient_accumulation_steps is 4 in the DeepSpeed configuration" in said
    assert "gradient_accumulation_steps is 2 in the training arguments" in said


def test_auto_and_equal_values_contradict_nothing() -> None:
    assert contradiction({ACCUMULATION: "auto", MICRO_BATCH: 8}, TRAINER, {}) is None
    assert contradiction({ACCUMULATION: 4}, ProgramProfile(batch={ACCUMULATION: 1}), {}) is None
