"""One study's measurements beside another's: what is noise, and what the studies tell of it."""

import random

import pytest

from trial_lib.messages.statistics import ratio_between


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
