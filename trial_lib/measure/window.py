"""When enough optimizer steps have been measured. Pure."""

import math
import statistics
from collections.abc import Sequence

from trial_lib.experiment.window import StepWindow


def decides_after(window: StepWindow, counted: int) -> bool:
    """Returns whether the ranks agree on going on after this many counted steps.

    The moments are fixed and their distance grows by half (3, 5, 8, 12, ...), so that agreeing costs little and every
    rank comes to the same ones.
    """
    moment = window.min_steps
    while moment < counted:
        moment = math.ceil(moment * 1.5)
    return counted == moment or counted >= window.max_steps


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
