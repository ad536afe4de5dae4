"""How the growth of a search is reckoned from the courses of its seeds."""

import pytest

from benchmarks.replay.growth import growth_of, trials_of_median
from benchmarks.replay.regret import Course


def course(*regrets: float) -> Course:
    """Returns a course whose answer is half below the best at its start."""
    return Course(0.5, tuple(range(len(regrets))), regrets, 0.0)


def test_the_median_counts_from_where_it_stays_within() -> None:
    courses = [course(0.2, 0.02, 0.1, 0.02, 0.01), course(0.2, 0.01, 0.1, 0.02, 0.01), course(0.5, 0.5, 0.5, 0.5, 0.5)]
    assert trials_of_median(courses, 0.03, 6) == 5
    assert trials_of_median(courses[2:], 0.03, 6) == 7


def test_a_course_that_has_ended_keeps_its_answer() -> None:
    assert trials_of_median([course(0.2, 0.02)], 0.03, 30) == 3


def test_growth_is_the_ratio_of_trials_and_varies_with_the_seeds() -> None:
    plain = [course(*[0.2] * few, *[0.0] * (8 - few)) for few in (1, 2, 3)]
    whole = [course(*[0.2] * few, *[0.0] * (8 - few)) for few in (3, 5, 7)]
    grown = growth_of(plain, whole, 0.03, 9)
    assert (grown.without, grown.with_switches, grown.factor) == (4, 7, 1.75)
    assert grown.error > 0.0
    assert grown.share_above == 1.0
    assert growth_of(plain, plain, 0.03, 9).factor == pytest.approx(1.0)
