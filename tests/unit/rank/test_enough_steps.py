import math

import pytest

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.rank.probe import is_enough, next_moment, relative_standard_error


def moments(window, step_times):
    """Returns the counted steps after which ranks agree that make steps of these times, the last one over and over."""
    agreed, counted = [], 0
    while counted < window.max_steps:
        counted = next_moment(window, made(step_times, counted))
        agreed.append(counted)
        if is_enough(window, made(step_times, counted)):
            break
    return agreed


def made(step_times, counted):
    return [step_times[min(place, len(step_times) - 1)] for place in range(counted)]


def test_the_first_moment_is_when_the_window_is_full():
    assert next_moment(StepWindow(start_step=2, end_step=11, max_steps=40), []) == 10
    assert next_moment(StepWindow(start_step=2, end_step=11, max_steps=40), [0.1, 0.2, 0.1]) == 10


def test_a_single_step_is_decided_after_one():
    window = StepWindow(1, 1, max_steps=1)
    assert moments(window, [0.1]) == [1]


def test_the_largest_number_of_steps_is_always_a_moment():
    unsteady = [0.1, 0.2, 0.1]
    assert next_moment(StepWindow(3, 5, max_steps=4), unsteady) == 4
    assert next_moment(StepWindow(3, 9, max_steps=4), []) == 4


def test_a_moment_comes_when_the_seconds_are_expected_to_be_over():
    # Of some 0.13 s each, 2 s are over after 16: moments that grow by half would come after 12 and 18.
    assert moments(StepWindow(max_seconds=2.0), [0.05, 0.25, 0.09, 0.16, 0.08, 0.17, 0.13]) == [3, 5, 8, 12, 16]


def test_a_moment_comes_when_the_error_is_expected_to_be_small_enough():
    # The standard error of the mean is 2.2 % after five, and falls with the root of their number.
    window, step_times = StepWindow(relative_error=0.02, max_seconds=1000), [0.95, 1.05, 0.95, 1.05, 1.0]
    assert relative_standard_error(step_times) == pytest.approx(0.0224, abs=1e-4)
    assert next_moment(window, step_times) == 7


def test_where_no_error_is_small_enough_the_moments_come_by_the_seconds_and_the_steps():
    assert moments(StepWindow(relative_error=0.0, max_seconds=0.99), [0.09, 0.11] * 5) == [3, 5, 8, 10]
    assert moments(StepWindow(relative_error=0.0, max_seconds=1000, max_steps=4), [0.1, 0.2]) == [3, 4]


def test_the_moments_are_neither_too_near_nor_too_far_apart():
    assert next_moment(StepWindow(end_step=4, max_seconds=1000), [1.0, 3.0]) == 3
    assert next_moment(StepWindow(end_step=22, max_seconds=20.1), [1.0, 1.2, 0.8, 1.1, 0.9] * 4) == 22
    assert next_moment(StepWindow(max_seconds=1000), [0.1, 0.3] * 6) == 18


def test_steady_times_are_enough_and_varying_ones_are_not():
    window = StepWindow(relative_error=0.02, max_seconds=1000)
    assert is_enough(window, [1.0, 1.01, 0.99])
    assert not is_enough(window, [1.0, 1.5, 0.8])


def test_varying_times_are_enough_after_the_steps_or_the_seconds():
    window = StepWindow(max_steps=4, max_seconds=10.0)
    assert not is_enough(window, [1.0, 3.0, 2.0])
    assert is_enough(window, [1.0, 3.0, 2.0, 1.5])
    assert is_enough(window, [1.0, 7.0, 2.0])


def test_the_standard_error_of_the_mean_shrinks_with_the_root_of_the_number():
    # Of 1 and 3: mean 2, standard deviation 2 ** 0.5, standard error 1.
    assert relative_standard_error([1.0, 3.0]) == pytest.approx(0.5)
    assert relative_standard_error([2.0]) == math.inf
