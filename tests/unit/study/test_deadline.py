"""How long a trial may take."""

import pytest

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.plans import deadline_s

WINDOW = StepWindow(start_step=3, end_step=5, max_seconds=2.0)
PROFILED = Candidate(micro_batch_size=1, gradient_accumulation_steps=2)


def profile(latency: float = 0.1, **phases: float) -> TrialResult:
    return TrialResult(
        trial_id="study-0000",
        number=0,
        purpose=Purpose.PROFILE,
        config_hash="",
        outcome=Outcome.COMPLETED,
        metrics={"latency": latency},
        phases=phases,
    )


def test_a_trial_has_two_minutes_and_five_times_what_it_should_take() -> None:
    candidate = Candidate(micro_batch_size=8, gradient_accumulation_steps=2)
    seconds = deadline_s(profile(**{"import": 1.0, "initialize": 2.0}), PROFILED, candidate, WINDOW)
    assert seconds == 120 + 5 * (3.0 + 5 * 0.1 * 8 + 2.0)


def test_steps_are_scaled_by_samples_a_rank() -> None:
    small, large = (Candidate(micro_batch_size=size, gradient_accumulation_steps=2) for size in (1, 100))
    assert deadline_s(profile(), PROFILED, large, WINDOW) - deadline_s(profile(), PROFILED, small, WINDOW) == (
        5 * 5 * 0.1 * 99
    )


def test_the_profile_s_wait_for_priming_and_builds_is_not_counted() -> None:
    waited, started = profile(start=300.0), profile(start=0.1)
    assert deadline_s(waited, PROFILED, PROFILED, WINDOW) == deadline_s(started, PROFILED, PROFILED, WINDOW)


def test_what_the_program_compiles_in_its_first_step_takes_its_time_in_every_trial() -> None:
    compiled, eager = profile(first_step=200.0), profile(first_step=0.1)
    more = deadline_s(compiled, PROFILED, PROFILED, WINDOW) - deadline_s(eager, PROFILED, PROFILED, WINDOW)
    assert more == pytest.approx(5 * 199.9)


def test_what_is_offloaded_has_to_be_filled_and_gone_through_in_each_step() -> None:
    kept = deadline_s(profile(), PROFILED, PROFILED, WINDOW)
    assert deadline_s(profile(), PROFILED, PROFILED, WINDOW, offloaded=20e9) - kept == 5 * 20 * (1 + 5)


def test_phases_that_a_failed_rank_did_not_reach_count_nothing() -> None:
    assert deadline_s(profile(latency=0.0), PROFILED, PROFILED, WINDOW) == 120 + 5 * 2.0


@pytest.mark.parametrize("place", ["model:compile", "--torch_compile"])
def test_a_model_that_only_a_switch_compiles_has_time_for_it(place: str) -> None:
    def seconds(is_on: bool) -> float:
        candidate = Candidate(knobs={"program": {place: is_on}}, micro_batch_size=1)
        return deadline_s(profile(), PROFILED, candidate, WINDOW)

    assert seconds(True) - seconds(False) == pytest.approx(900)
