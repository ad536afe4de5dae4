"""One study's measurements beside another's: what is noise, and what the studies tell of it."""

import random

import pytest

from zerotune.trial_lib.messages.statistics import largest_fall


def night(rng: random.Random, level: float = 100.0, day: float = 0.0, process: float = 0.02) -> list[float]:
    """Four processes of one study, on a machine that is another one each day."""
    today = level * rng.lognormvariate(0.0, day)
    return [today * rng.lognormvariate(0.0, process) for _ in range(4)]


def studies_of(
    rng: random.Random, nights: int, loses: float, after: int, day: float, process: float
) -> list[list[float]]:
    """Nights at one level, and from `after` on each slower than the one before it by a share."""
    return [night(rng, 100.0 * (1.0 - loses) ** max(0, n - after), day, process) for n in range(nights)]


def beyond_noise(studies: list[list[float]], unknown: float) -> bool:
    ratio = largest_fall(studies, unknown).ratio
    return ratio.high < 1.0 and ratio.value <= 0.98


@pytest.mark.parametrize("before", [1, 6, 12])
def test_two_in_a_hundred_that_are_lost_each_night_are_seen_within_five_nights(before: int) -> None:
    missed = 0
    for seed in range(100):
        studies = studies_of(random.Random(seed), before + 5, 0.02, before - 1, day=0.003, process=0.005)
        missed += not any(beyond_noise(studies[:night], 0.01) for night in range(before + 1, before + 6))
    assert missed == 0


@pytest.mark.parametrize(("day", "process", "unknown"), [(0.003, 0.005, 0.01), (0.02, 0.02, 0.05)])
def test_a_hundred_nights_without_a_change_raise_one_false_alarm_at_most(
    day: float, process: float, unknown: float
) -> None:
    for seed in range(10):
        studies = studies_of(random.Random(seed), 100, 0.0, 0, day, process)
        alarms, begin = 0, 0
        for now in range(1, 100):
            if beyond_noise(studies[max(begin, now - 20) : now + 1], unknown):
                alarms, begin = alarms + 1, now
        assert alarms <= 1


def test_a_fall_is_told_from_the_best_level_and_not_from_before_a_rise() -> None:
    rng = random.Random(5)
    studies = [night(rng, level, 0.002, 0.002) for level in [100] * 4 + [120] * 4 + [108] * 2]
    fall = largest_fall(studies, unknown=0.01)
    assert (fall.first, fall.begin) == (4, 8)
    assert fall.ratio.low < 0.9 < fall.ratio.high < 0.95


def test_a_study_beside_the_level_before_it_is_compared_with_all_that_held_it() -> None:
    rng = random.Random(6)
    studies = [night(rng, 100.0, 0.002, 0.002) for _ in range(8)]
    fall = largest_fall([*studies, night(rng, 120.0)], unknown=0.01, earliest=8)
    assert fall.begin == 8
    assert fall.ratio.low < 1.2 < fall.ratio.high
    assert fall.ratio.low > 1.1


def test_processes_that_are_close_say_little_of_other_days() -> None:
    ratio = largest_fall([[100.0, 100.01, 100.02], [97.0, 97.01, 97.02]], unknown=0.05).ratio
    assert ratio.low < 0.9 < 1.0 < ratio.high
