"""The regret of a replay as it goes on."""

from math import inf

import pytest
from small_table import LARGE_BUCKET, PLAIN, SMALL_BUCKET, candidate, small_table

from benchmarks.replay.driver import Replay, ReplayedTrial
from benchmarks.replay.regret import Course
from benchmarks.replay.table import TableWorld
from zerotune.trial_lib.records.result import Outcome

WORLD = TableWorld(small_table())
BEST = candidate(PLAIN, 11)


def course(*reported):
    trials = [
        ReplayedTrial(10.0 * (place + 1), each, Outcome.COMPLETED if place else Outcome.OUT_OF_MEMORY, each)
        for place, each in enumerate(reported)
    ]
    return Course.of(Replay(5.0, candidate(LARGE_BUCKET, 4), trials), WORLD)


def test_regret_is_the_share_below_the_best_of_the_true_value_of_the_answer():
    regrets = course(candidate(PLAIN, 4), BEST).regrets
    assert regrets == pytest.approx((1 - 100 / WORLD.best, 0.0))


def test_an_answer_that_does_not_fit_is_worth_nothing():
    assert course(candidate(LARGE_BUCKET, 8)).regrets == (1.0,)


def test_the_profile_trial_is_the_first_and_the_answer_then_is_the_submitted_configuration():
    searched = course(candidate(PLAIN, 4), BEST)
    assert searched.after_trials(1) == searched.start == pytest.approx(1 - 80 / WORLD.best)
    assert searched.after_trials(2) == searched.regrets[0]
    assert searched.after_trials(40) == 0.0


def test_regret_after_a_time_is_that_of_the_last_trial_that_had_ended():
    searched = course(candidate(PLAIN, 4), BEST)
    assert searched.after_seconds(9.0) == searched.start
    assert searched.after_seconds(19.0) == searched.regrets[0]
    assert searched.after_seconds(20.0) == 0.0


def test_to_be_near_is_to_stay_near():
    near, far = candidate(PLAIN, 11), candidate(SMALL_BUCKET, 4)
    assert course(near, far, near, near).seconds_within(0.03) == 30.0
    assert course(near, far).seconds_within(0.03) == inf


def test_the_trials_to_stay_near_count_the_profile_trial():
    near, far = candidate(PLAIN, 11), candidate(SMALL_BUCKET, 4)
    assert course(near, far, near, near).trials_within(0.03) == 4.0
    assert course(near, far).trials_within(0.03) == inf


def test_out_of_memory_is_counted():
    assert course(BEST, BEST, BEST, BEST).out_of_memory == 0.25
