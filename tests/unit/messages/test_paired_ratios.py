"""Ratios with intervals, from rounds that measured everything once."""

import math
import random

import pytest

from zerotune.trial_lib.messages.statistics import geometric_mean, ratios_to


def test_what_drifts_within_no_round_is_in_no_ratio() -> None:
    rounds = [{"own": drift, "a": 2.0 * drift} for drift in (1.0, 7.0, 100.0)]
    gain = ratios_to("own", rounds, 0.05)["a"]
    assert (gain.value, gain.low, gain.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_is_student_s() -> None:
    # log ratios 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, and t(0.975, 2) = 4.3027.
    rounds = [{"own": 1.0, "a": math.exp(power)} for power in (0.1, 0.2, 0.3)]
    gain = ratios_to("own", rounds, 0.05)["a"]
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert (gain.value, gain.low, gain.high) == pytest.approx(
        (math.exp(0.2), math.exp(0.2 - half), math.exp(0.2 + half))
    )
    assert geometric_mean([row["a"] for row in rounds], 0.05) == gain


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
    ("noise", "most"), [({"own": 0.02, "a": 0.02, "b": 0.02}, 0.06), ({"own": 0.02, "a": 0.06, "b": 0.02}, 0.1)]
)
def test_an_interval_leaves_out_the_truth_as_seldom_as_it_says(noise: dict[str, float], most: float) -> None:
    draws = random.Random(5)
    missed = 0
    for _ in range(2000):
        rounds = [{name: math.exp(draws.gauss(0, deviation)) for name, deviation in noise.items()} for _ in range(4)]
        found = ratios_to("own", rounds, 0.05)["a"]
        missed += found.low > 1.0 or found.high < 1.0
    assert missed <= most * 2000
