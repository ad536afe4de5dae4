"""What the failure of the profile trial says of the program."""

import pytest

from trial_lib.experiment.candidate import Purpose
from trial_lib.experiment.result import Outcome, TrialResult
from trial_lib.study.profile_report import profile_failure

BEFORE = {"start": 0.1}
IN_INITIALIZE = {"start": 0.1, "import": 1.0}
KILLED: dict[str, float] = {}


def failure(outcome: Outcome, phases: dict[str, float], had_engine: bool, **mappings: str) -> str:
    result = TrialResult(
        trial_id="study-0",
        number=0,
        purpose=Purpose.PROFILE,
        config_hash="0" * 16,
        outcome=outcome,
        reason="This is why.",
        phases=phases,
    )
    return profile_failure(result, had_engine, mappings)


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.INVALID, Outcome.TIMED_OUT])
def test_a_program_that_never_comes_to_deepspeed_does_not_run_as_given(outcome: Outcome) -> None:
    said = failure(outcome, BEFORE, False)
    assert said == "The program does not run as given: it never had a DeepSpeed engine. This is why."


def test_a_mapped_flag_is_named_as_what_was_not_given() -> None:
    said = failure(Outcome.CRASHED, BEFORE, False, train_micro_batch_size_per_gpu="--batchsize")
    assert said.startswith("The program does not run as given (--batchsize apart)")


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.TIMED_OUT])
def test_a_program_that_fails_later_is_told_what_was_changed_even_if_it_left_no_record(outcome: Outcome) -> None:
    assert "changes nothing but the micro-batch, to 1" in failure(outcome, KILLED, True)


def test_a_configuration_that_deepspeed_refuses_or_that_does_not_fit_has_to_run_with_one_sample() -> None:
    assert "able to run with a micro-batch of 1: invalid" in failure(Outcome.INVALID, IN_INITIALIZE, False)
    assert "able to run with a micro-batch of 1: out_of_memory" in failure(Outcome.OUT_OF_MEMORY, KILLED, True)
