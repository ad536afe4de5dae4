"""When enough optimizer steps have been measured. Pure."""

import math
import statistics
from collections.abc import Sequence

from trial_lib.wire.step_window import StepWindow

# How many times as many steps as at a moment there are at the next.
_LEAST_GROWTH, _MOST_GROWTH = 1.1, 1.5


def next_moment(window: StepWindow, step_times: Sequence[float]) -> int:
    """Returns after how many counted steps the ranks agree on whether it is enough.

    When it is expected to be, by what has been counted; but not before a tenth more is, so that agreeing costs little,
    nor after half as many again, for the first few say little of the next.

    Args:
        window: what is to be measured.
        step_times: of the counted steps so far (s, of the slowest rank), alike on every rank: all have to come to the
            same moment.
    """
    counted = len(step_times)
    if counted < window.min_steps:
        return min(window.min_steps, window.max_steps)
    for_seconds = window.max_seconds / statistics.fmean(step_times)
    # No error is small enough where it is to be 0.
    needed = relative_standard_error(step_times) / window.relative_error if window.relative_error else math.inf
    for_error = counted * needed**2
    expected = max(_LEAST_GROWTH * counted, min(for_seconds, for_error, _MOST_GROWTH * counted))
    return min(math.ceil(expected), window.max_steps)


def is_enough(window: StepWindow, step_times: Sequence[float]) -> bool:
    """Returns whether these counted step times (s, of the slowest rank) need no further one."""
    return (
        len(step_times) >= window.max_steps
        or sum(step_times) >= window.max_seconds
        or relative_standard_error(step_times) <= window.relative_error
    )


def relative_standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean over the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)
