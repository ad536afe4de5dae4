"""Decides when enough optimizer steps have been measured. Pure functions."""

import math
import statistics
from collections.abc import Sequence

from trial_lib.wire.step_window import StepWindow

# The smallest and the largest growth of the number of steps from one moment to the next.
_LEAST_GROWTH, _MOST_GROWTH = 1.1, 1.5


def next_moment(window: StepWindow, step_times: Sequence[float]) -> int:
    """Returns the number of counted steps after which the ranks next decide whether the steps are enough.

    It is the expected end of the measurement, by the steps so far. Agreement costs time, so at least a tenth more steps
    come first. The first few steps predict the next ones badly, so at most half as many again come first.

    Args:
        window: the steps to measure.
        step_times: of the counted steps so far (s, of the slowest rank), the same on every rank. All ranks have to
            reach the same moment.
    """
    counted = len(step_times)
    if counted < window.min_steps:
        return min(window.min_steps, window.max_steps)
    for_seconds = window.max_seconds / statistics.fmean(step_times)
    # If the error has to be 0, no measured error is small enough.
    needed = relative_standard_error(step_times) / window.relative_error if window.relative_error else math.inf
    for_error = counted * needed**2
    expected = max(_LEAST_GROWTH * counted, min(for_seconds, for_error, _MOST_GROWTH * counted))
    return min(math.ceil(expected), window.max_steps)


def is_enough(window: StepWindow, step_times: Sequence[float]) -> bool:
    """Returns whether these counted step times (s, of the slowest rank) are enough."""
    return (
        len(step_times) >= window.max_steps
        or sum(step_times) >= window.max_seconds
        or relative_standard_error(step_times) <= window.relative_error
    )


def relative_standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean, divided by the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)
