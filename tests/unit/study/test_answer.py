"""The answer of a study: which trial won, by how much, and the configuration to train with."""

from dataclasses import replace

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import without_tuning_keys
from zerotune.trial_lib.messages.measurement import BatchSizes, ProgramProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.confirm import gain
from zerotune.trial_lib.study.driver import best_result, ignored_batch_reason, untuned_batch
from zerotune.trial_lib.study.history import Asked, StudyState, Told


def trial(
    number: int, purpose: Purpose = Purpose.SEARCH, outcome: Outcome = Outcome.COMPLETED, **metrics: float
) -> TrialResult:
    return TrialResult(
        trial_id=f"study-{number:04d}",
        number=number,
        purpose=purpose,
        config_hash=str(number),
        outcome=outcome,
        metrics=metrics,
    )


def test_the_largest_throughput_and_the_smallest_latency_win() -> None:
    trials = [trial(2, throughput=10.0, latency=0.3), trial(3, throughput=20.0, latency=0.4)]
    throughput, latency = best_result(trials, "throughput"), best_result(trials, "latency")
    assert throughput is not None
    assert latency is not None
    assert (throughput.number, latency.number) == (3, 2)


def test_of_equals_the_earlier_wins() -> None:
    best = best_result([trial(1, Purpose.SUBMITTED, throughput=10.0), trial(2, throughput=10.0)], "throughput")
    assert best is not None
    assert best.number == 1


def test_the_submitted_configuration_can_win_and_the_profile_cannot() -> None:
    trials = [trial(0, Purpose.PROFILE, throughput=99.0), trial(1, Purpose.SUBMITTED, throughput=2.0)]
    best = best_result([*trials, trial(2, throughput=1.0)], "throughput")
    assert best is not None
    assert best.number == 1


def test_a_trial_that_failed_or_lacks_the_metric_does_not_win() -> None:
    trials = [trial(2, outcome=Outcome.DIVERGED, throughput=10.0), trial(3, latency=1.0)]
    assert best_result(trials, "throughput") is None


@pytest.mark.parametrize(("metric", "ours", "theirs"), [("throughput", 30.0, 20.0), ("latency", 0.2, 0.3)])
def test_a_gain_above_one_is_better_in_either_direction(metric: str, ours: float, theirs: float) -> None:
    best, submitted = trial(2, **{metric: ours}), trial(1, Purpose.SUBMITTED, **{metric: theirs})
    assert gain(best, submitted, metric) == pytest.approx(1.5)


def test_there_is_no_gain_over_a_configuration_that_did_not_complete_or_was_not_measured() -> None:
    best = trial(2, throughput=30.0)
    assert gain(best, trial(1, Purpose.SUBMITTED, Outcome.OUT_OF_MEMORY), "throughput") is None
    assert gain(best, None, "throughput") is None


def test_sections_that_only_a_tuner_reads_are_left_out() -> None:
    config = {"autotuning": {"enabled": True}, "zero_optimization": {"stage": 1}}
    assert without_tuning_keys(config) == {"zero_optimization": {"stage": 1}}


def ignoring(number: int, arrived: int) -> TrialResult:
    """A trial that asked for more than the one batch size that the program knows."""
    found = {"reason": f"batches of {arrived}", "micro_batch_arrived": arrived}
    return replace(trial(number, outcome=Outcome.INVALID), **found)


SIZES = {0: 1, 1: 1, 2: 8, 3: 4}


def state_of(*results: TrialResult) -> StudyState:
    """Returns the state of a study with some ended trials, of the micro-batch sizes in `SIZES`."""
    state = StudyState()
    for result in results:
        state.apply(Asked(result.number, result.purpose, Candidate(micro_batch_size=SIZES[result.number])))
        state.apply(Told(result.number, result))
    return state


def test_a_program_that_feeds_one_sample_whatever_is_asked_is_found_out_after_the_profile() -> None:
    state = state_of(trial(0, Purpose.PROFILE), trial(1, Purpose.SUBMITTED), ignoring(2, arrived=1))
    assert ignored_batch_reason(state) == "batches of 1"


def test_a_program_that_once_took_what_was_asked_ignores_nothing() -> None:
    assert ignored_batch_reason(state_of(ignoring(2, arrived=1), trial(3))) is None
    assert ignored_batch_reason(state_of(trial(0, Purpose.PROFILE), trial(1))) is None


def test_a_data_set_that_is_too_small_for_a_size_ignores_nothing() -> None:
    assert ignored_batch_reason(state_of(ignoring(2, arrived=5))) is None


@pytest.mark.parametrize(("typed", "rows", "is_told"), [(1, 1, True), (4, 1, False), (1, 8, False)])
def test_a_program_whose_typed_size_arrives_whatever_is_asked_is_tuned_at_that_size(
    typed: int, rows: int, is_told: bool
) -> None:
    program = ProgramProfile(typed_batch=BatchSizes(typed, typed, 1), rows_per_sample=rows)
    profile = replace(trial(0, Purpose.PROFILE), program=program)
    assert untuned_batch(state_of(profile)) == ""
    said = untuned_batch(state_of(profile, trial(1, Purpose.SUBMITTED), ignoring(2, arrived=1)))
    assert said == ("The micro-batch was not tuned and stays 1. batches of 1" if is_told else "")


def test_a_program_whose_profile_has_shown_it_needs_no_trial_to_show_it_again() -> None:
    program = ProgramProfile(typed_batch=BatchSizes(8, 4, 2), fixed_batch="It reads --size.")
    profile = replace(trial(0, Purpose.PROFILE), program=program)
    assert untuned_batch(state_of(profile)) == "The micro-batch was not tuned and stays 4. It reads --size."
