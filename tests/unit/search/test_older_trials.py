"""A search that is told trials of an earlier one, of their memory alone or all; one that begins with a candidate."""

from dataclasses import replace

import pytest
from adaptive_world import SPACE, SimulatedModel, adaptive, drive, problem, trials

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.methods import METHODS as OWN

METHODS = ["adaptive", "asha", "binary", "random"]


def without_speed(result):
    return replace(result, metrics={})


def told(history, change=lambda result: result, **settings):
    """Returns a search that knows the trials of an earlier one."""
    search = adaptive(**settings)
    for candidate, result in trials(history):
        search.observe(candidate, change(result))
    return search


def out_of_memory(history):
    return sum(result.outcome is Outcome.OUT_OF_MEMORY for _, result in trials(history))


def fastest(history):
    return max(result.metrics.get("throughput", 0.0) for _, result in trials(history))


@pytest.fixture(scope="module")
def earlier():
    """A search on a model that needs more memory than its profile says."""
    return drive(adaptive(min_gain=0, max_trials=31), SimulatedModel(memory=300, per_sample=30.0).run)


def test_what_is_known_of_memory_spares_trials_that_do_not_fit(earlier):
    model = SimulatedModel(memory=300, per_sample=30.0)
    assert out_of_memory(earlier) > 0
    history = drive(told(earlier, without_speed), model.run)
    assert out_of_memory(history) == 0
    assert fastest(history) >= 0.97 * fastest(earlier)


def test_trials_of_which_only_the_memory_is_known_are_measured_again(earlier):
    # Meanwhile stage 0 has become the fastest.
    model = SimulatedModel(memory=300, per_sample=30.0, speed={0: 1.4, 1: 1.0, 2: 1.05, 3: 0.7})
    search = told(earlier, without_speed)
    drive(search, model.run)
    assert search.best[0].zero_stage == 0


def test_a_search_that_is_told_all_of_an_earlier_one_repeats_nothing_and_is_soon_over(earlier):
    model = SimulatedModel(memory=300, per_sample=30.0)
    search = told(earlier, max_trials=50)
    # A study begins with the earlier one's winner.
    winner, result = max(trials(earlier), key=lambda trial: trial[1].metrics.get("throughput", 0.0))
    search.apply(winner)
    search.tell(winner, model.run(winner))
    history = drive(search, model.run)
    before = {(candidate.family, candidate.micro_batch_size) for candidate, _ in trials(earlier)}
    before.remove((winner.family, winner.micro_batch_size))
    assert not before & {(candidate.family, candidate.micro_batch_size) for candidate, _ in trials(history)}
    assert len(trials(history)) < len(trials(earlier)) / 2
    assert search.best[1].metrics["throughput"] >= result.metrics["throughput"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_search_that_begins_with_a_candidate_goes_on_as_usual(method, stage):
    arm = next(arm for arm in SPACE.arms if arm.knobs["zero_optimization"]["stage"] == stage)
    settings = {"metric": "throughput", "max_trials": 12}
    found = OWN[method].load()
    search = found(OWN[method].settings(**settings, zero_stages=(1, 2, 3)), problem())
    first = Candidate(knobs=arm.family(0), micro_batch_size=16, slots=2, data_parallel_size=2)
    search.apply(first)
    model = SimulatedModel()
    search.tell(first, model.run(first))
    history = drive(search, model.run)
    assert 0 < len(trials(history)) <= 10
    assert first not in [candidate for candidate, _ in trials(history)]
    assert search.best is not None
