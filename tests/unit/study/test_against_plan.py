"""A study's trials beside what its plan foresaw: which figures, for which trials, once each."""

from types import SimpleNamespace

import pytest

from tests.unit.study.test_study_plan import CONFIG, CPU, H100, MODEL, devices, opened, record
from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.plan.plan_record import PlannedTrials
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.advice import AgainstPlan

__all__ = ["opened"]
BASE = {**CONFIG, "zero_optimization": {"stage": 2}}
GIB = 2**30


def candidate(stage, size):
    return Candidate(
        knobs={"zero_optimization": {"stage": stage}}, micro_batch_size=size, slots=8, data_parallel_size=8
    )


def result(number, purpose=Purpose.SEARCH, outcome=Outcome.COMPLETED, **more):
    memory = Memory(peak=[50 * GIB, 60 * GIB], after_initialize=[20 * GIB] * 2, steps_peak=[48 * GIB, 58 * GIB])
    told = {"metrics": {"throughput": 20.0}, "memory": memory, **more}
    return TrialResult(
        trial_id=f"s-{number}", number=number, purpose=purpose, config_hash=str(number), outcome=outcome, **told
    )


def state(*ended, profile=MODEL):
    results = {each.number: each for each, _ in ended}
    first = result(0, Purpose.PROFILE, profile=profile)
    return SimpleNamespace(
        profile=first,
        results={0: first, **results},
        candidates={0: candidate(2, 1), **{each.number: what for each, what in ended}},
    )


@pytest.fixture
def plan(opened):
    return opened(record(devices("h100-80gb", 79.1)), H100)


def test_a_trial_of_a_foreseen_arm_has_both_figures_of_memory_and_speed(plan, tmp_path):
    file = tmp_path / "planned_trials.json"
    AgainstPlan(plan, file).add(state((result(2), candidate(3, 4)), (result(3), candidate(1, 4))), BASE)
    kept = PlannedTrials.in_file(file)
    assert (kept.devices, kept.is_here, kept.of_steps) == ("h100-80gb:8", True, False)
    (trial,) = kept.trials  # the plan did not run the other arm
    assert (trial.number, trial.label, trial.micro_batch) == (2, "z3", 4)
    assert trial.measured_memory == 58 * GIB
    assert 10 * GIB < trial.memory < 79 * GIB
    assert trial.low < trial.samples_per_s < trial.high
    assert trial.measured_samples_per_s == 20.0


def test_more_samples_are_foreseen_to_take_more(plan, tmp_path):
    file = tmp_path / "planned_trials.json"
    AgainstPlan(plan, file).add(state((result(2), candidate(3, 4)), (result(3), candidate(3, 8))), BASE)
    small, large = PlannedTrials.in_file(file).trials
    assert small.memory < large.memory


def test_a_trial_that_failed_has_no_measured_figures(plan, tmp_path):
    file = tmp_path / "planned_trials.json"
    AgainstPlan(plan, file).add(state((result(2, outcome=Outcome.OUT_OF_MEMORY), candidate(3, 4))), BASE)
    (trial,) = PlannedTrials.in_file(file).trials
    assert (trial.measured_memory, trial.measured_samples_per_s) == (None, None)
    assert trial.memory > 0


def test_trials_are_added_as_they_end_and_once_each(plan, tmp_path):
    file = tmp_path / "planned_trials.json"
    ended = [(result(3), candidate(3, 8)), (result(2, Purpose.SUBMITTED), candidate(3, 4))]
    AgainstPlan(plan, file).add(state(ended[0]), BASE)
    # As a resumed study does it.
    resumed = AgainstPlan(plan, file)
    resumed.add(state(*ended), BASE)
    resumed.add(state(*ended), BASE)
    assert [trial.number for trial in PlannedTrials.in_file(file).trials] == [2, 3]


def test_of_a_plan_for_gpus_a_study_on_processors_compares_the_memory_of_the_steps(opened, tmp_path):
    plan, file = opened(record(devices("h100-80gb", 79.1)), CPU), tmp_path / "planned_trials.json"
    memory = Memory(peak=[50 * GIB], after_initialize=[20 * GIB])
    AgainstPlan(plan, file).add(state((result(2, memory=memory), candidate(3, 4))), BASE)
    kept = PlannedTrials.in_file(file)
    (trial,) = kept.trials
    assert (kept.is_here, kept.of_steps, trial.samples_per_s) == (False, True, None)
    assert trial.measured_memory == 30 * GIB
