"""One study's measurements beside another's: what is noise, and what the studies tell of it."""

import random

import pytest

from zerotune.trial_lib.messages.statistics import largest_fall, ratio_between


def night(rng: random.Random, level: float = 100.0, day: float = 0.0, process: float = 0.02) -> list[float]:
    """Four processes of one study, on a machine that is another one each day."""
    today = level * rng.lognormvariate(0.0, day)
    return [today * rng.lognormvariate(0.0, process) for _ in range(4)]


def test_the_ratio_is_that_of_the_geometric_means() -> None:
    ratio = ratio_between([40.0, 90.0], [100.0, 144.0], [], unknown=0.01)
    assert ratio.value == pytest.approx(0.5)


def test_a_fall_by_a_fifth_is_no_noise_and_one_by_two_in_a_hundred_is() -> None:
    rng = random.Random(1)
    last = night(rng)
    assert ratio_between(night(rng, 80.0), last, [], unknown=0.01).high < 1.0
    assert ratio_between(night(rng, 98.0), last, [], unknown=0.01).high > 1.0


def test_what_processes_of_one_day_do_not_show_is_allowed_for() -> None:
    ratio = ratio_between([97.0, 97.01, 97.02], [100.0, 100.01, 100.02], [], unknown=0.05)
    assert ratio.low < 0.9 < 1.0 < ratio.high


@pytest.mark.parametrize(("nights", "unknown"), [(1, 0.03), (4, 0.0), (12, 0.0)])
def test_the_same_again_is_called_slower_in_few_nights_of_a_hundred(nights: int, unknown: float) -> None:
    alarms = 0
    for seed in range(2000):
        rng = random.Random(seed)
        *before, last = [night(rng, day=0.03) for _ in range(nights)]
        alarms += ratio_between(night(rng, day=0.03), last, before, unknown).high < 1.0
    assert alarms / 2000 <= 0.05


def test_quiet_nights_let_a_smaller_fall_be_seen() -> None:
    rng = random.Random(3)
    nights = [night(rng, day=0.002, process=0.002) for _ in range(8)]
    now = night(rng, 97.0, day=0.002, process=0.002)
    assert ratio_between(now, nights[-1], [], unknown=0.05).high > 1.0
    assert ratio_between(now, nights[-1], nights[:-1], unknown=0.05).high < 1.0


def test_a_single_process_of_each_says_nothing_of_the_noise() -> None:
    ratio = ratio_between([50.0], [100.0], [], unknown=0.01)
    assert ratio.value == pytest.approx(0.5)
    assert ratio.low == 0.0
    assert ratio.high == float("inf")


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
