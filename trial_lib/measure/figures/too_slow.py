"""Decides whether a running trial can still reach the best, by a bound from its first counted steps. Pure functions."""

import math
import statistics
from collections.abc import Sequence

from trial_lib.statistics.student_t import t_quantile
from trial_lib.wire.step_window import StepWindow

ERROR_RATE = 0.01
"""The largest share of trials that could reach the best and are stopped all the same, over all looks together."""

# Step times repeat only within some percent. If three steps scatter less by chance, this value replaces their scatter.
_LEAST_SPREAD = 0.05
# Two steps are little evidence. A third costs little, unless a step takes this long (s).
_LONG_STEP = 5.0
_LEAST_STEPS, _LEAST_SHORT_STEPS = 2, 3


def looks_after(window: StepWindow, counted: int) -> bool:
    """Returns whether the ranks look at a trial with something to beat after this many counted steps.

    Each look comes after half as many steps again as the last one. When the window is full it has moments of its own.
    Each look is an agreement of the ranks.
    """
    moment = _LEAST_STEPS
    while moment < min(counted, window.min_steps):
        moment = math.ceil(moment * 1.5)
    return moment == counted <= window.min_steps


def throughput_bound(step_times: Sequence[float], samples_per_step: float) -> float:
    """Returns the largest possible throughput (samples/s) by these steps, at the error rate.

    It is infinite for too few steps. Otherwise it is a one-sided Student bound on the mean logarithm of the step time,
    because step times scatter by factors. The k-th look spends the share 1/(k (k + 1)) of the error rate. These shares
    add up to the whole.

    Args:
        step_times: seconds of the counted steps so far, on the slowest rank.
        samples_per_step: over all ranks.
    """
    count = len(step_times)
    # The first step alone decides, so that the later looks are fixed before their steps are seen.
    is_long = count > 0 and step_times[0] > _LONG_STEP
    look = count - (_LEAST_STEPS if is_long else _LEAST_SHORT_STEPS) + 1
    if look < 1:
        return math.inf
    logarithms = [math.log(seconds) for seconds in step_times]
    spread = max(statistics.stdev(logarithms), _LEAST_SPREAD)
    quantile = t_quantile(1 - ERROR_RATE / (look * (look + 1)), count - 1)
    return samples_per_step / math.exp(statistics.fmean(logarithms) - quantile * spread / math.sqrt(count))


def is_hopeless(step_times: Sequence[float], samples_per_step: float, to_beat: float) -> bool:
    """Returns whether a trial can no longer reach the best.

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
        f"After {len(step_times)} counted steps it trains at most {most:.3g} samples/s ({1 - ERROR_RATE:.0%} sure). "
        f"The best has {to_beat:.3g}."
    )
