"""What the failure of the profile trial says of the program."""

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.messages.measurement import ModelProfile, ProgramProfile
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.profile_report import model_notes, profile_failure, program_notes

BEFORE = {"start": 0.1}
IN_INITIALIZE = {"start": 0.1, "import": 1.0}
KILLED: dict[str, float] = {}


def failure(outcome: Outcome, phases: dict[str, float], had_engine: bool, arrived: int | None = None) -> str:
    result = TrialResult(
        trial_id="study-0",
        number=0,
        purpose=Purpose.PROFILE,
        config_hash="0" * 16,
        outcome=outcome,
        reason="This is why.",
        phases=phases,
        micro_batch_arrived=arrived,
    )
    return profile_failure(result, had_engine)


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.INVALID, Outcome.TIMED_OUT])
def test_a_program_that_never_comes_to_deepspeed_does_not_run_as_typed(outcome: Outcome) -> None:
    said = failure(outcome, BEFORE, False)
    assert said == "The program does not run as it was typed: it never had a DeepSpeed engine. This is why."


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.TIMED_OUT])
def test_a_program_that_fails_later_fails_as_typed_even_if_it_left_no_record(outcome: Outcome) -> None:
    assert failure(outcome, KILLED, True) == "The program fails as it was typed. This is why."


def test_a_configuration_that_deepspeed_refuses_does_not_work_as_typed() -> None:
    assert failure(Outcome.INVALID, IN_INITIALIZE, False).startswith(
        "The program cannot be tuned as it was typed: invalid."
    )


def test_a_model_of_which_no_sample_fits_is_told_so() -> None:
    assert failure(Outcome.OUT_OF_MEMORY, KILLED, True).startswith("Not even a micro-batch of 1 fits into memory.")
    assert failure(Outcome.OUT_OF_HOST_MEMORY, KILLED, True).startswith("The host's memory, not the device's, is not")


def test_batches_that_do_not_follow_are_told_as_that() -> None:
    said = failure(Outcome.INVALID, IN_INITIALIZE, True, arrived=8)
    assert said == "The program's batches do not have the requested size. This is why."


def test_a_configuration_that_is_handed_over_twice_is_told_and_nothing_else_is() -> None:
    (note,) = program_notes(ProgramProfile(hands_over_two_configs=True))
    assert "Trials use `config`" in note
    assert program_notes(ProgramProfile()) == program_notes(None) == []


def test_a_mapping_that_is_left_out_and_a_size_that_ranks_divide_are_told() -> None:
    flag = "--per_device_train_batch_size"
    found = ProgramProfile(divided_among=2, arg_mappings={MICRO_BATCH: flag})
    left_out, divided = program_notes(found, {TRAIN_BATCH: flag})
    assert left_out == f"{flag} sets {MICRO_BATCH}. The mapping that says {TRAIN_BATCH} is left out."
    assert "the typed size is 2 times as large" in divided
    assert program_notes(found, {MICRO_BATCH: flag}) == [divided]
    # The program reads both spellings.
    dashed = flag.replace("_train", "-train")
    assert program_notes(found, {TRAIN_BATCH: dashed})[0].startswith(f"{dashed} sets {MICRO_BATCH}.")


def test_devices_in_the_code_are_told_with_what_their_numbers_mean() -> None:
    (note,) = program_notes(ProgramProfile(devices_in_code="CUDA_VISIBLE_DEVICES=1"))
    assert note.startswith("The code sets CUDA_VISIBLE_DEVICES=1. In a trial these numbers count the trial's own")


@pytest.mark.parametrize(("stage", "stages"), [(0, "ZeRO 0"), (1, "ZeRO 1 or 2"), (2, "ZeRO 1 or 2"), (3, "ZeRO 3")])
def test_a_checkpoint_that_the_program_resumes_is_told_with_the_stages_that_can(stage: int, stages: str) -> None:
    (note,) = program_notes(ProgramProfile(resumed_stage=stage))
    assert f"from a checkpoint of ZeRO {stage}." in note
    ranks = " on as many ranks as before" if stage else ""
    assert f"DeepSpeed resumes it with {stages} alone{ranks}." in note


@pytest.mark.parametrize(
    ("uncounted", "said"),
    [([], None), (["flash_attn::forward"], "of flash_attn::forward are"), (list("abcdef"), "a, b, c, d and 2 more")],
)
def test_work_that_nobody_could_count_is_named(uncounted: list[str], said: str | None) -> None:
    profile = ModelProfile(
        num_params=1,
        trainable_num_params=1,
        activation_mem_per_gpu=1,
        gpu_mem=1,
        data_parallel_size=1,
        flops_per_sample=1.0,
        uncounted=uncounted,
    )
    notes = model_notes(profile)
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]
