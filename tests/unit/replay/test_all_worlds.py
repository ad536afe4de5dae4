"""What a method is worth over all worlds."""

import pytest

from benchmarks.replay.all_worlds import clock_seconds, overall
from benchmarks.replay.regret import Course


def course(*regrets, seconds=10.0):
    return Course(1.0, tuple(seconds * (place + 1) for place in range(len(regrets))), regrets, 0.0)


COURSES = {
    "fast": {"clock": [course(0.5, 0.4, 0.2, 0.1)], "other": [course(0.3, 0.02, 0.02, 0.02, seconds=20.0)]},
    "slow": {"clock": [course(0.5, 0.2, 0.2, 0.1, seconds=1000.0)], "other": [course(0.1, 0.02, seconds=1000.0)]},
}


def test_time_is_counted_in_trials_of_one_method_world_by_world():
    assert clock_seconds(COURSES, "clock", 3) == {"fast": 20.0, "slow": 2000.0}


def test_regret_is_the_mean_and_the_worst_over_the_worlds_of_the_medians_over_the_seeds():
    seeds = {"world": {"clock": [course(0.1), course(0.2), course(0.9)]}, "other": {"clock": [course(0.4)]}}
    figures = overall(seeds, "clock", (2,), most_trials=2, share=0.03)["clock"]
    assert figures.after_trials == {2: pytest.approx(0.3)}
    assert figures.worst_after_trials == {2: 0.4}


def test_after_the_same_time_a_slower_method_has_ended_fewer_trials():
    figures = overall(COURSES, "clock", (3,), most_trials=5, share=0.03)
    assert figures["clock"].after_time == {3: pytest.approx(0.3)}
    assert figures["other"].after_time == {3: pytest.approx((0.3 + 0.02) / 2)}
    assert figures["other"].worst_after_time == {3: 0.3}


def test_to_come_near_is_to_stay_near_in_the_mean_over_the_worlds():
    figures = overall(COURSES, "clock", (3,), most_trials=5, share=0.03)
    assert figures["other"].trials_within == 5
    assert figures["clock"].trials_within is None
    assert overall(COURSES, "clock", (3,), most_trials=4, share=0.03)["other"].trials_within is None


def test_a_method_that_leaves_again_has_not_come_near():
    leaving = {"world": {"clock": [course(0.01, 0.01, 0.5, 0.02)]}}
    assert overall(leaving, "clock", (2,), most_trials=5, share=0.03)["clock"].trials_within == 5
