import math

import pytest

from trial_lib.experiment.window import StepWindow
from trial_lib.measure.window import decides_after, is_enough, relative_standard_error


def test_the_ranks_agree_at_moments_that_grow_by_half():
    window = StepWindow(start_step=3, end_step=5, max_steps=40)
    assert [counted for counted in range(1, 41) if decides_after(window, counted)] == [3, 5, 8, 12, 18, 27, 40]


def test_a_single_step_is_decided_after_one():
    window = StepWindow(1, 1, max_steps=1)
    assert decides_after(window, 1)
    assert is_enough(window, [0.1])


def test_nothing_is_decided_before_the_window_is_full():
    window = StepWindow(start_step=2, end_step=11, max_steps=40)
    assert not any(decides_after(window, counted) for counted in range(1, 10))
    assert decides_after(window, 10)


def test_the_largest_number_of_steps_is_always_a_moment():
    assert decides_after(StepWindow(3, 5, max_steps=10), 10)
    assert decides_after(StepWindow(3, 9, max_steps=4), 4) is True


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
