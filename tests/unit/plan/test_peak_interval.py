"""The interval of a row's reserved memory has what no foreseen run shows, and that of allocated memory has not."""

import pytest

from zerotune.trial_lib.plan.device_memory import LiveBytes
from zerotune.trial_lib.plan.fits import GIB, ForeseenWay, PeakForecast, ends_of, interval, peak_interval
from zerotune.trial_lib.search.budgets import Uncertain

FIGURE, NEEDED = Uncertain(40 * GIB, 4 * GIB), Uncertain(35 * GIB, 3 * GIB)
WAY = ForeseenWay(1.0, FIGURE, NEEDED)


def test_an_allocated_peak_has_the_interval_of_its_error_alone() -> None:
    assert ends_of([WAY], float("inf"), is_kept=False) == pytest.approx(interval(FIGURE), rel=1e-6)


def test_reserved_memory_may_grow_to_the_whole_device_and_not_beyond() -> None:
    low, high = ends_of([WAY], 80 * GIB, is_kept=True)
    assert FIGURE.mean - 2 * FIGURE.deviation < low < interval(FIGURE)[0] + GIB
    assert interval(FIGURE)[1] + 10 * GIB < high < 80 * GIB


def test_a_full_device_shows_anything_between_what_is_needed_and_all() -> None:
    full = ForeseenWay(1.0, Uncertain(90 * GIB, 4 * GIB), Uncertain(70 * GIB, 3 * GIB))
    low, high = ends_of([full], 80 * GIB, is_kept=True)
    assert 64 * GIB < low < 70 * GIB
    assert high == pytest.approx(80 * GIB)


def test_a_source_that_leaves_recomputation_open_has_both_in_its_interval() -> None:
    little = ForeseenWay(0.76, Uncertain(20 * GIB, 2 * GIB), NEEDED)
    low, high = ends_of([ForeseenWay(0.24, FIGURE, NEEDED), little], float("inf"), is_kept=False)
    assert low < 18 * GIB
    assert high > 40 * GIB


def test_the_memory_of_a_plan_may_grow_as_that_of_public_trainings_does() -> None:
    forecast = PeakForecast.of(
        micro_batch=1,
        live=LiveBytes(place="device", moments=()),
        allocated=40 * GIB,
        reserved=44 * GIB,
        least=41 * GIB,
        outside=Uncertain(GIB, 0.3 * GIB),
    )
    low, high = peak_interval(forecast, 80 * GIB)
    assert low == interval(forecast.needed)[0]
    assert (low, high) == (low, ends_of([ForeseenWay(1.0, forecast.shown, forecast.needed)], 80 * GIB, is_kept=True)[1])
    assert interval(forecast.shown)[1] < high < 80 * GIB
    # What does not fit has no room to grow.
    assert peak_interval(forecast, 30 * GIB) == interval(forecast.needed)
