"""What the adaptive search measures another time: the best of many readings is the luckiest."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from adaptive_world import SimulatedModel, adaptive, drive, ended, problem, trials

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.knobs import Arm, SearchSpace


def test_only_what_may_be_the_answer_is_asked_for_again_and_never_beside_itself():
    model = SimulatedModel()

    def run(candidate):
        return ended(Outcome.CRASHED) if candidate.zero_stage == 2 else model.run(candidate)

    in_flight, outcomes, again = set(), {}, 0
    for what, asked, result in drive(adaptive(min_gain=0, max_trials=60, concurrency=3), run, 3):
        key = asked.key
        if what == "ask":
            assert key not in in_flight
            assert outcomes.get(key, Outcome.COMPLETED) is Outcome.COMPLETED
            again += key in outcomes
            in_flight.add(key)
        else:
            in_flight.remove(key)
            outcomes[key] = result.outcome
    assert Outcome.CRASHED in outcomes.values()
    assert again


def read_anew(model, noise):
    """Returns what runs a candidate: no two readings of it are the same."""
    draws = random.Random(1)

    def run(candidate):
        result = model.run(candidate)
        if result.outcome is not Outcome.COMPLETED:
            return result
        value = model.throughput(candidate) * (1 + draws.gauss(0, noise))
        return replace(result, metrics={**result.metrics, "throughput": value})

    return run


def readings_of_the_answer(noise, seed):
    search = adaptive(seed=seed, max_trials=31)
    history = drive(search, read_anew(SimulatedModel(), noise))
    return [candidate.key for candidate, _ in trials(history)].count(search.best[0].key)


@pytest.mark.long
def test_where_readings_vary_the_answer_has_been_measured_again():
    assert sum(readings_of_the_answer(0.1, seed) > 1 for seed in range(5)) >= 4


def test_what_runs_out_of_memory_when_it_is_measured_again_is_not_the_answer():
    model, asked = SimulatedModel(), Counter()
    read = read_anew(model, 0.1)

    def run(candidate):
        asked[candidate.key] += 1
        return read(candidate) if asked[candidate.key] == 1 else ended(Outcome.OUT_OF_MEMORY)

    search = adaptive(max_trials=31)
    drive(search, run)
    again = {key for key, times in asked.items() if times > 1}
    assert again
    assert search.best[0].key not in again


def test_a_reading_that_fails_another_time_costs_its_size_and_not_what_ran_beside_it():
    model, asked, failed = SimulatedModel(), Counter(), []
    read = read_anew(model, 0.1)

    def run(candidate):
        asked[candidate.key] += 1
        if asked[candidate.key] == 2 and not failed:
            failed.append(candidate.key)
            return ended(Outcome.CRASHED)
        return read(candidate)

    # Of a space of one family whatever runs after that is what ran beside it.
    only = SearchSpace.of_arms([Arm({"zero_optimization": {"stage": 1}})])
    history = drive(adaptive(problem(space=only), max_trials=41, min_gain=0), run)
    ran = [candidate.key for candidate, _ in trials(history)]
    assert ran.count(failed[0]) == 2
    place = max(place for place, key in enumerate(ran) if key == failed[0])
    assert len(ran) > place + 1


@pytest.mark.parametrize("outcome", [Outcome.TOO_SLOW, Outcome.OUT_OF_MEMORY, Outcome.CRASHED])
def test_where_nothing_but_the_submitted_configuration_ran_nothing_is_expected(outcome):
    search = adaptive(max_trials=8)
    own = Candidate(knobs={"zero_optimization": {"stage": 1}}, micro_batch_size=4, slots=2, data_parallel_size=2)
    assert search.expected() == {}
    search.observe(own, replace(SimulatedModel().run(own), purpose=Purpose.SUBMITTED))
    assert search.expected() == {}
    drive(search, lambda candidate: ended(outcome))
    assert search.expected() == {}
    assert search.best is None
