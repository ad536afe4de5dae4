"""A mapping is held against the engine of the program as it was typed."""

from dataclasses import replace

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.inputs.places import BatchPlace
from zerotune.trial_lib.messages.measurement import BatchSizes, ProgramProfile
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.profile import as_mapped, held_against, wrong_mapping
from zerotune.trial_lib.study.program import KnownProgram

SEEN = ProgramProfile(typed_batch=BatchSizes(train_batch_size=32, micro_batch_size=8, gradient_accumulation_steps=2))


@pytest.fixture
def profiled() -> TrialResult:
    """How a run of a program as it was typed has ended."""
    return TrialResult(
        trial_id="s-0000", number=0, purpose=Purpose.PROFILE, config_hash="0", outcome=Outcome.COMPLETED, logs=[]
    )


def place(key: str, value: int) -> BatchPlace:
    return BatchPlace(key, value, f"--x {value}")


@pytest.mark.parametrize("places", [[], [place(MICRO_BATCH, 8)], [place(ACCUMULATION, 2), place(TRAIN_BATCH, 32)]])
def test_a_mapping_that_agrees_with_the_engine_is_right(places: list[BatchPlace]) -> None:
    assert as_mapped(SEEN, places) == SEEN
    assert wrong_mapping(SEEN, places, {}) is None


def test_what_the_program_feeds_goes_before_what_its_engine_is_set_to() -> None:
    stale = replace(SEEN, typed_batch=BatchSizes(4, 1, 2), rows_per_sample=8)
    found = as_mapped(stale, [place(MICRO_BATCH, 8)])
    assert (found.typed_batch, found.rows_per_sample) == (BatchSizes(32, 8, 2), 1)
    assert wrong_mapping(found, [place(MICRO_BATCH, 8)], {}) is None


def test_what_the_program_feeds_may_stand_in_the_second_dimension() -> None:
    update = {"typed_batch": BatchSizes(4, 1, 2), "rows_per_sample": 128, "other_rows_per_sample": 8}
    found = as_mapped(replace(SEEN, **update), [place(MICRO_BATCH, 8)])
    assert (found.typed_batch, found.rows_per_sample, found.batch_dimension) == (BatchSizes(32, 8, 2), 1, 1)


def test_a_sample_of_several_rows_stays_one() -> None:
    pairs = replace(SEEN, rows_per_sample=2)
    assert as_mapped(pairs, [place(MICRO_BATCH, 8)]) == pairs


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        (MICRO_BATCH, 32, f"If it sets the {TRAIN_BATCH}, map that key to it."),
        (MICRO_BATCH, 16, "Map the place that sets it, or nothing."),
        (ACCUMULATION, 8, f"If it sets the {MICRO_BATCH}, map that key to it."),
        (TRAIN_BATCH, 16, "Map the place that sets it, or nothing."),
    ],
)
def test_a_mapping_that_the_engine_contradicts_is_told_with_a_remedy(key: str, value: int, remedy: str) -> None:
    found = as_mapped(SEEN, [place(key, value)])
    said = wrong_mapping(found, [place(key, value)], {})
    assert said is not None
    assert f"{key} is mapped to --x {value}, but as typed the program's engine has" in said
    assert said.endswith(remedy)


@pytest.mark.parametrize(("default", "batch"), [(8, BatchSizes(32, 8, 2)), (3, BatchSizes(4, 1, 2))])
def test_an_option_that_was_left_at_its_default_may_say_what_is_fed_and_contradicts_nothing(
    default: int, batch: BatchSizes, profiled: TrialResult
) -> None:
    update = {"typed_batch": BatchSizes(4, 1, 2), "rows_per_sample": 8, "options": {"--batch": default}}
    result = replace(profiled, program=replace(SEEN, **update))
    held = held_against(result, [], {MICRO_BATCH: "--batch"})
    assert held.program is not None
    assert held.program.typed_batch == batch


def test_nothing_is_said_of_a_program_that_came_to_no_engine() -> None:
    assert wrong_mapping(ProgramProfile(), [place(MICRO_BATCH, 8)], {}) is None


def test_a_mapped_stage_is_held_against_the_configuration() -> None:
    places = [BatchPlace("zero_optimization.stage", 1, "--zero-stage 1")]
    assert wrong_mapping(SEEN, places, {"zero_optimization": {"stage": 1}}) is None
    said = wrong_mapping(SEEN, places, {"zero_optimization": {"stage": 2}})
    assert said is not None
    assert said.startswith(
        "zero_optimization.stage is mapped to --zero-stage 1, but as typed the program's engine has 2"
    )


def test_a_stage_that_the_code_takes_from_its_command_counts_before_that_of_the_file(profiled: TrialResult) -> None:
    places = [BatchPlace("zero_optimization.stage", 3, "--zero-stage 3")]
    handed = replace(SEEN, ds_config={"zero_optimization": {"stage": 3}})
    result = replace(profiled, program=handed)
    held = held_against(result, places, {}, {"zero_optimization": {"stage": 2}})
    assert held.outcome is profiled.outcome


@pytest.mark.parametrize("zero", [True, {"stage": 1}, {"stage": "1"}, {"stage": "auto"}])
def test_a_stage_counts_as_deepspeed_reads_it_and_an_open_one_contradicts_nothing(zero: object) -> None:
    places = [BatchPlace("zero_optimization.stage", 1, "--zero-stage 1")]
    assert wrong_mapping(SEEN, places, {"zero_optimization": zero}) is None


def test_an_option_whose_name_begins_like_a_known_one_is_another() -> None:
    found = replace(SEEN, arg_mappings={MICRO_BATCH: "--batch"})
    said = wrong_mapping(found, [BatchPlace(TRAIN_BATCH, 8, "--batch_size 8")], {})
    assert said is not None
    assert said.endswith(f"If it sets the {MICRO_BATCH}, map that key to it.")
    for known, shown in (("--batch-size", "--batch_size=8"), ("--batch_size", "--batch-size 8")):
        found = replace(SEEN, arg_mappings={MICRO_BATCH: known})
        assert wrong_mapping(found, [BatchPlace(TRAIN_BATCH, 8, shown)], {}) is None


def test_an_option_that_is_known_to_set_one_size_is_no_mapping_of_another() -> None:
    flag = "--per_device_train_batch_size"
    found = replace(SEEN, arg_mappings={MICRO_BATCH: flag})
    assert wrong_mapping(found, [BatchPlace(TRAIN_BATCH, 8, f"{flag} 8")], {}) is None
    assert KnownProgram(arg_mappings={TRAIN_BATCH: flag}).learned(found).arg_mappings == {MICRO_BATCH: flag}


def test_a_typed_size_that_ranks_divide_is_that_of_all_of_them() -> None:
    divided = replace(SEEN, divided_among=2)
    assert wrong_mapping(divided, [place(MICRO_BATCH, 16), place(TRAIN_BATCH, 32)], {}) is None
    assert wrong_mapping(divided, [place(MICRO_BATCH, 8)], {}) is not None
    config = {MICRO_BATCH: 4, ACCUMULATION: 4, TRAIN_BATCH: 32}
    assert KnownProgram(found=divided).in_words(config) == {**config, MICRO_BATCH: 8}
    assert KnownProgram(found=divided).in_file(config) == config
    by_trainer = replace(divided, batch={MICRO_BATCH: 8})
    # It compares these with its argument, and with the product of its argument and the ranks.
    assert KnownProgram(found=by_trainer).in_file(config) == {**config, MICRO_BATCH: 8, TRAIN_BATCH: 64}
