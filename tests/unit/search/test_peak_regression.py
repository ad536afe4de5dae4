import math
import random

import pytest

from zerotune.trial_lib.search.peak_regression import Mixture, PeakRegression, Prior


def regression():
    return PeakRegression([Prior(1.0, (1.0, 1.0), (0.5, 0.5))], [0.1, 0.1])


def test_without_an_observation_the_prior_speaks():
    prediction = regression().predict([[1, 3]], "a", scale=0.0, noise_share=0.0)
    assert prediction.mean == pytest.approx(4)
    assert prediction.deviation == pytest.approx(((1 + 9) * (0.25 + 0.01)) ** 0.5)


def test_exact_observations_are_found_to_be_exact():
    model = regression()
    for x in range(1, 9):
        model.observe([[1, x]], "a", 1.0, 1.5 + 0.7 * x)
    prediction = model.predict([[1, 20]], "a", 1.0)
    assert prediction.mean == pytest.approx(1.5 + 0.7 * 20, rel=0.01)
    assert prediction.deviation < 0.3


def test_noisy_observations_are_found_to_be_noisy():
    rng = random.Random(0)
    model = regression()
    for _ in range(40):
        x = rng.uniform(0, 5)
        model.observe([[1, x]], "a", 1.0, 1 + x + rng.gauss(0, 0.12))
    assert model.predict([[1, 2]], "a", 1.0).deviation == pytest.approx(0.12, rel=0.4)


def test_groups_share_what_they_have_in_common_and_keep_what_they_have_not():
    model = regression()
    for x in range(6):
        model.observe([[1, x]], "a", 0.1, 2.0 + 1.5 * x)
        model.observe([[1, x]], "b", 0.1, 2.1 + 1.5 * x)
    one, other = (model.predict([[1, 3]], group, 0.1).mean for group in ("a", "b"))
    assert other - one == pytest.approx(0.1, abs=0.02)
    new = model.predict([[1, 3]], "c", 0.1)
    assert new.mean == pytest.approx(2.05 + 4.5, abs=0.1)
    assert new.deviation > 2 * model.predict([[1, 3]], "a", 0.1).deviation


def test_the_order_of_exact_observations_does_not_matter():
    points = [([[1, x]], group, 1.0 + x) for x in range(4) for group in ("a", "b")]
    one, other = regression(), regression()
    for features, group, value in points:
        one.observe(features, group, 1.0, value)
    for features, group, value in reversed(points):
        other.observe(features, group, 1.0, value)
    assert one.predict([[1, 7]], "a", 1.0).mean == pytest.approx(other.predict([[1, 7]], "a", 1.0).mean)


def test_a_bound_moves_what_was_expected_below_it_and_little_of_what_was_above():
    below, above = regression(), regression()
    below.observe_above([[1, 3]], "a", 0.1, bound=6.0, deviation=0.1)
    above.observe_above([[1, 3]], "a", 0.1, bound=1.0, deviation=0.1)
    assert below.predict([[1, 3]], "a", 0.1).mean > 6
    assert above.predict([[1, 3]], "a", 0.1).mean == pytest.approx(4, abs=0.2)
    assert below.predict([[1, 3]], "a", 0.1).deviation < regression().predict([[1, 3]], "a", 0.1).deviation


def test_a_bound_far_above_all_expectation_breaks_nothing():
    model = regression()
    model.observe_above([[1, 3]], "a", 0.1, bound=400.0, deviation=0.1)
    prediction = model.predict([[1, 3]], "a", 0.1, noise_share=0.0)
    assert prediction.mean == pytest.approx(400, rel=0.1)
    # The noise is a share of what is expected, and that is far more now.
    assert 0 < prediction.deviation < 0.1 * 400


def test_a_peak_is_the_larger_of_its_moments_and_teaches_of_that_one():
    """What is constant and what grows: the constant hides the slope until it is the smaller one."""
    model = PeakRegression([Prior(1.0, (1.0, 1.0), (0.5, 0.5))], [0.0, 0.0])

    def moments(x):
        return [[0, x], [10, 0]]

    for x in (1, 2, 3):
        model.observe(moments(x), "a", 1.0, 12.0)
    assert model.predict(moments(1), "a", 1.0).mean == pytest.approx(12, rel=0.02)
    before = model.predict(moments(30), "a", 1.0)
    assert before.deviation > 0.4 * 30
    for x in (20, 30):
        model.observe(moments(x), "a", 1.0, 1.6 * x)
    assert model.predict(moments(40), "a", 1.0).mean == pytest.approx(1.6 * 40, rel=0.02)
    assert model.predict(moments(1), "a", 1.0).mean == pytest.approx(12, rel=0.02)


def test_the_larger_of_two_that_are_alike_is_expected_above_both():
    model = PeakRegression([Prior(1.0, (1.0, 1.0), (0.5, 0.5))], [0.0, 0.0])
    # Clark's equations: two independent sums of mean 1 and deviation 0.5.
    both = model.predict([[1, 0], [0, 1]], "a", 0.0, noise_share=0.0)
    assert both.mean == pytest.approx(1 + 0.5 / math.pi**0.5, rel=1e-6)
    assert both.deviation == pytest.approx(0.5 * (1 - 1 / math.pi) ** 0.5, rel=1e-6)


def test_the_quantiles_of_a_mixture_hold_their_share():
    mixture = Mixture((0.25, 0.75), (0.0, 10.0), (1.0, 2.0))
    for share in (0.05, 0.5, 0.95):
        assert mixture.below(mixture.quantile(share)) == pytest.approx(share, abs=1e-6)
    assert mixture.mean == pytest.approx(7.5)
    assert mixture.below(5.0, deviation=100.0) == pytest.approx(0.5, abs=0.02)


def test_moments_that_turn_out_to_be_at_once_are_foreseen_as_their_sum():
    apart, at_once = (Prior(0.75, (1.0, 1.0), (0.5, 0.5)), Prior(0.25, (1.0, 1.0), (0.5, 0.5), at_once=True))
    model = PeakRegression([apart, at_once], [0.0, 0.0])

    def moments(x):
        return [[0, x], [10, 0]]

    assert model.predict(moments(10), "a", 1.0).mean < 0.75 * 13 + 0.25 * 20
    for x in (1, 4, 7, 10):
        model.observe(moments(x), "a", 1.0, 10.0 + x)
    assert model.predict(moments(20), "a", 1.0).mean == pytest.approx(30, rel=0.02)
    # Nor is there a moment that could be asked about by itself.
    assert model.predict(moments(20), "a", 1.0, only=0).mean == pytest.approx(30, rel=0.02)
    assert PeakRegression([apart], [0.0, 0.0]).predict(moments(20), "a", 1.0, only=1).mean == pytest.approx(10)


def test_a_prediction_may_leave_out_a_part_of_the_noise():
    model = regression()
    for x, scattered in ((1, 0.3), (2, -0.3), (3, 0.3), (4, -0.3)) * 5:
        model.observe([[1, x]], "a", 1.0, 1 + x + scattered)
    whole, without = (model.predict([[1, 2]], "a", 1.0, noise_share=share) for share in (1.0, 0.0))
    assert without.mean == whole.mean
    assert without.deviation < 0.5 * whole.deviation
