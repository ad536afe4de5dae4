import math
import random

import pytest

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.rank.probe import ERROR_RATE, is_hopeless, looks_after, throughput_bound, too_slow_reason


def looked_at(step_times, samples, to_beat):
    """Whether any look at the growing list of step times stops the trial."""
    return any(is_hopeless(step_times[:count], samples, to_beat) for count in range(1, len(step_times) + 1))


def test_a_trial_half_as_fast_as_the_best_is_hopeless_after_three_steps():
    assert is_hopeless([0.20, 0.21, 0.20], samples_per_step=8, to_beat=80)


def test_a_trial_about_as_fast_as_the_best_goes_on():
    assert not is_hopeless([0.11, 0.11, 0.11], samples_per_step=8, to_beat=80)


def test_three_equal_readings_prove_no_more_than_the_least_spread_does():
    assert throughput_bound([0.1, 0.1, 0.1], samples_per_step=1) > 1.2 * 10


def test_steps_that_scatter_leave_more_possible():
    steady, scattered = [0.2, 0.2, 0.2], [0.1, 0.2, 0.4]
    assert throughput_bound(scattered, 1) > 10 * throughput_bound(steady, 1)


def test_more_steps_leave_less_possible():
    bounds = [throughput_bound([0.1, 0.11] * (count // 2), 1) for count in (4, 8, 16, 32)]
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize(("step_times", "decides"), [([60.0], False), ([0.5, 0.5], False), ([60.0, 60.0], True)])
def test_two_steps_are_enough_only_where_they_are_long(step_times, decides):
    assert is_hopeless(step_times, samples_per_step=1, to_beat=100) is decides


@pytest.mark.parametrize(
    "spread", [pytest.param(0.02, marks=pytest.mark.long), 0.1, pytest.param(0.3, marks=pytest.mark.long)]
)
def test_a_trial_as_fast_as_the_best_is_stopped_no_more_often_than_stated(spread):
    draw = random.Random(7)
    trials = 500
    stopped = sum(
        looked_at([math.exp(draw.gauss(0.0, spread)) for _ in range(20)], samples=1, to_beat=1.0) for _ in range(trials)
    )
    # Three standard errors above the rate.
    assert stopped / trials < ERROR_RATE + 3 * math.sqrt(ERROR_RATE / trials)


def test_a_trial_half_as_fast_is_stopped_within_a_few_scattered_steps():
    draw = random.Random(7)
    runs = [[2 * math.exp(draw.gauss(0.0, 0.1)) for _ in range(8)] for _ in range(200)]
    assert sum(looked_at(run, samples=1, to_beat=1.0) for run in runs) > 190


def test_the_reason_says_what_was_possible_and_what_there_was_to_beat():
    reason = too_slow_reason([0.2, 0.2, 0.2], samples_per_step=8, to_beat=93.0)
    assert reason == "After 3 counted steps it trains at most 53.3 samples/s (99% sure). The best has 93."


def test_the_looks_come_before_the_first_decision_further_and_further_apart():
    window = StepWindow(start_step=3, end_step=12, max_steps=40)
    assert [counted for counted in range(1, 41) if looks_after(window, counted)] == [2, 3, 5, 8]
    assert [counted for counted in range(1, 41) if looks_after(StepWindow(), counted)] == [2, 3]
