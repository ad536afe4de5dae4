"""Whether a running trial can still reach the best: a bound from its first counted steps. Pure."""

import math
import statistics
from collections.abc import Sequence

from trial_lib.statistics.student_t import t_quantile
from trial_lib.wire.step_window import StepWindow

ERROR_RATE = 0.01
"""At most this part of the trials that would reach the best are stopped, however often each is looked at."""

# Below that, three steps that happen to be alike say nothing of the next: step times repeat within some percent.
_LEAST_SPREAD = 0.05
# Two say little, and a third costs little, unless a step is long (s).
_LONG_STEP = 5.0
_LEAST_STEPS, _LEAST_SHORT_STEPS = 2, 3


def looks_after(window: StepWindow, counted: int) -> bool:
    """Returns whether a trial that has something to beat is looked at after this many counted steps.

    After 2, 3, 5 and 8, and on by half as many again, until the window is full and has moments of its own; each is an
    agreement of the ranks.
    """
    moment = _LEAST_STEPS
    while moment < min(counted, window.min_steps):
        moment = math.ceil(moment * 1.5)
    return moment == counted <= window.min_steps


def throughput_bound(step_times: Sequence[float], samples_per_step: float) -> float:
    """Returns the most samples/s that these steps leave possible, at the error rate; infinite for too few of them.

    A one-sided Student bound on the mean logarithm of the step time: step times scatter by factors. Each look spends a
    part of the error rate, 1/(k (k + 1)) of it the k-th, and these parts add up to the whole.

    Args:
        step_times: seconds of the counted steps so far, on the slowest rank.
        samples_per_step: over all ranks.
    """
    count = len(step_times)
    # By the first step alone, so that the looks to come are fixed before the others are known.
    is_long = count > 0 and step_times[0] > _LONG_STEP
    look = count - (_LEAST_STEPS if is_long else _LEAST_SHORT_STEPS) + 1
    if look < 1:
        return math.inf
    logarithms = [math.log(seconds) for seconds in step_times]
    spread = max(statistics.stdev(logarithms), _LEAST_SPREAD)
    quantile = t_quantile(1 - ERROR_RATE / (look * (look + 1)), count - 1)
    return samples_per_step / math.exp(statistics.fmean(logarithms) - quantile * spread / math.sqrt(count))


def is_hopeless(step_times: Sequence[float], samples_per_step: float, to_beat: float) -> bool:
    """Returns whether a trial cannot reach the best any more.

    Args:
        step_times: seconds of the counted steps so far, on the slowest rank.
        samples_per_step: over all ranks.
        to_beat: the best's throughput in samples/s over all ranks.
    """
    return throughput_bound(step_times, samples_per_step) < to_beat


def too_slow_reason(step_times: Sequence[float], samples_per_step: float, to_beat: float) -> str:
    """Returns the sentence for a trial that was stopped."""
    most = throughput_bound(step_times, samples_per_step)
    return (
        f"After {len(step_times)} counted steps it trains {most:.3g} samples/s at most ({1 - ERROR_RATE:.0%}); "
        f"the best has {to_beat:.3g}."
    )
