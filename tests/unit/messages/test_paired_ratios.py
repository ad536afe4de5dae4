"""Ratios with intervals, from rounds that measured everything once."""

import math
import random
import statistics

import pytest

from zerotune.trial_lib.messages.statistics import chance_to_tell, mean_rate, ratios_to, rounds_to_tell


def test_what_drifts_within_no_round_is_in_no_ratio() -> None:
    rounds = [{"own": drift, "a": 2.0 * drift} for drift in (1.0, 7.0, 100.0)]
    gain = ratios_to("own", rounds, 0.05)["a"]
    assert (gain.value, gain.low, gain.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_long_round_counts_as_much_as_a_training_pays_for_it() -> None:
    # 1 + 4 seconds against 1 + 2 for the same work.
    gain = ratios_to("own", [{"own": 1.0, "a": 1.0}, {"own": 1 / 4, "a": 1 / 2}], 0.05)["a"]
    assert gain.value == pytest.approx(5 / 3)
    assert gain.low < 1.5


def test_the_interval_is_student_s_where_rounds_are_alike() -> None:
    # Log ratios 0.01, 0.02, 0.03: mean 0.02, deviation 0.01, and t(0.975, 2) = 4.3027.
    rounds = [{"own": 1.0, "a": math.exp(power)} for power in (0.01, 0.02, 0.03)]
    gain = ratios_to("own", rounds, 0.05)["a"]
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (gain.value, gain.low, gain.high) == pytest.approx(
        (math.exp(0.02), math.exp(0.02 - half), math.exp(0.02 + half)), rel=2e-4
    )
    assert mean_rate([row["a"] for row in rounds], 0.05) == gain


def test_others_help_to_know_the_noise() -> None:
    draws = random.Random(4)
    rounds = [{name: math.exp(draws.gauss(0, 0.02)) for name in ("own", "a", "b", "c")} for _ in range(3)]
    few = [{name: row[name] for name in ("own", "a")} for row in rounds]
    assert ratios_to("own", rounds, 0.05)["a"].spread < 0.08
    assert len(ratios_to("own", few, 0.05)) == 1


def test_one_round_says_nothing_of_the_noise() -> None:
    gain = ratios_to("own", [{"own": 1.0, "a": 3.0}], 0.05)["a"]
    assert (gain.value, gain.low, gain.high) == (pytest.approx(3.0), 0.0, math.inf)


@pytest.mark.parametrize(
    ("noise", "most"),
    [
        ({"own": 0.02, "a": 0.02, "b": 0.02}, 0.06),
        ({"own": 0.02, "a": 0.06, "b": 0.02}, 0.1),
        ({"own": 0.06, "a": 0.02, "b": 0.02, "c": 0.02}, 0.06),
    ],
)
def test_an_interval_leaves_out_the_truth_as_seldom_as_it_says(noise: dict[str, float], most: float) -> None:
    draws = random.Random(5)
    missed = 0
    for _ in range(2000):
        rounds = [{name: math.exp(draws.gauss(0, deviation)) for name, deviation in noise.items()} for _ in range(4)]
        found = ratios_to("own", rounds, 0.05)["a"]
        missed += found.low > 1.0 or found.high < 1.0
    assert missed <= most * 2000


def test_noise_that_earlier_rounds_have_shown_narrows_an_interval_that_stays_right() -> None:
    draws = random.Random(8)
    missed = narrower = 0
    for _ in range(1000):
        rounds = [{name: math.exp(draws.gauss(0, 0.05)) for name in ("own", "a")} for _ in range(7)]
        before = ratios_to("own", rounds[:4], 0.05)["a"]
        alone, found = ratios_to("own", rounds[4:], 0.05)["a"], ratios_to("own", rounds[4:], 0.05, before)["a"]
        missed += not found.low <= 1.0 <= found.high
        narrower += found.spread < alone.spread
    assert missed <= 60
    assert narrower > 700


@pytest.mark.parametrize("later", [12, 40])
def test_the_chance_that_more_rounds_tell_is_how_often_they_do(later: int) -> None:
    draws = random.Random(6)
    foreseen, told, times = 0.0, 0, 1000
    for _ in range(times):
        gain = draws.uniform(-0.3, 0.3)
        rounds = [{"own": 1.0, "a": math.exp(gain + draws.gauss(0, 0.1))} for _ in range(later)]
        before, after = ratios_to("own", rounds[:8], 0.01)["a"], ratios_to("own", rounds, 0.01)["a"]
        foreseen += chance_to_tell(before, 8, later, 0.01, 1.02)
        told += after.low > 1.0 or after.high < 1.02
    assert foreseen / times == pytest.approx(told / times, abs=0.03)


@pytest.mark.parametrize("gain", [0.0, 0.05, 0.2])
def test_so_many_more_rounds_tell_in_80_of_100_cases_if_the_gain_is_what_it_seemed(gain: float) -> None:
    draws = random.Random(7)

    def some(count: int, gain: float) -> list[dict[str, float]]:
        return [{"own": 1.0, "a": math.exp(gain + draws.gauss(0, 0.05))} for _ in range(count)]

    told = []
    for _ in range(300):
        rounds = some(8, gain)
        seen = ratios_to("own", rounds, 0.01)["a"]
        more, _ = rounds_to_tell(seen, 8, 0.01, 1.02, most=1008)
        if more:
            later = ratios_to("own", [*rounds, *some(more, math.log(seen.value))], 0.01)["a"]
            told.append(later.low > 1.0 or later.high < 1.02)
    assert len(told) > 250
    assert sum(told) >= 0.8 * len(told)


@pytest.mark.parametrize("gain", [0.0, 0.01, 0.05])
def test_on_so_quiet_a_machine_the_most_rounds_tell_in_80_of_100_cases(gain: float) -> None:
    draws = random.Random(9)

    def some(count: int, gain: float, noise: float) -> list[dict[str, float]]:
        return [{"own": 1.0, "a": math.exp(gain + draws.gauss(0, noise))} for _ in range(count)]

    told = []
    for _ in range(300):
        seen = ratios_to("own", some(8, gain, 0.2), 0.01)["a"]
        more, noise = rounds_to_tell(seen, 8, 0.01, 1.02, most=24)
        if not more:
            assert noise < seen.noise
            later = ratios_to("own", some(24, math.log(seen.value), noise), 0.01)["a"]
            told.append(later.low > 1.0 or later.high < 1.02)
    assert len(told) > 200
    assert sum(told) >= 0.8 * len(told)


def test_noise_that_the_reference_brings_is_not_taken_for_more() -> None:
    """Three ratios that vary together say no more than one, so as many rounds more are foreseen."""
    draws = random.Random(8)
    foreseen: dict[int, list[int]] = {1: [], 3: []}
    for _ in range(200):
        reference = [math.exp(draws.gauss(0, 0.05)) for _ in range(8)]
        for count, more in foreseen.items():
            things = {str(place): 1.0 + draws.gauss(0, 0.001) for place in range(count)}
            gain = ratios_to("own", [{"own": own, **things} for own in reference], 0.01)["0"]
            more.append(rounds_to_tell(gain, 8, 0.01, 1.02, most=1008)[0])
    assert statistics.median(foreseen[3]) == pytest.approx(statistics.median(foreseen[1]), rel=0.1)
