"""How many times one study's measurements are another's, with an interval. Pure.

Within a study everything is compared round by round, so that what a machine does from minute to minute cancels out.
From one study to the next there is nothing to pair: a machine that has become a little warmer, or busier, is slower
for all processes of that day together, and their scatter does not show it. So the interval has a second part, how much
one configuration varies from study to study. The studies themselves tell it once there are enough of them; before, it
is taken to be what `unknown` says.
"""

import math
import statistics
from collections.abc import Sequence

from trial_lib.statistics.paired_ratios import Ratio
from trial_lib.statistics.student_t import t_quantile

ERROR = 0.05
_ENOUGH_STUDIES = 4


def ratio_between(
    now: Sequence[float], last: Sequence[float], before: Sequence[Sequence[float]], unknown: float
) -> Ratio:
    """Returns how many times the last study's values this one's are.

    Args:
        now: what each process of this study measured, positive.
        last: the same of the last study.
        before: the same of the studies before it that measured the same under the same conditions.
        unknown: the standard deviation from study to study, as a share, where there are too few to tell.
    """
    ours, theirs = ([math.log(value) for value in values] for values in (now, last))
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    levels = [statistics.fmean(math.log(value) for value in values) for values in (*before, last)]
    freedom = len(ours) + len(theirs) - 2
    scatter = (_squares(ours) + _squares(theirs)) / freedom * (1 / len(ours) + 1 / len(theirs)) if freedom else 0.0
    if len(levels) >= _ENOUGH_STUDIES:
        # What processes scatter is in the levels' variance already, but four levels may lie together by luck.
        half = _half(max(2.0 * statistics.variance(levels), scatter), len(levels) - 1)
    else:
        half = _half(scatter + 2.0 * unknown**2, freedom)
    return Ratio(math.exp(difference), math.exp(difference - half), _exp(difference + half))


def _half(variance: float, freedom: int) -> float:
    return t_quantile(1.0 - ERROR / 2.0, freedom) * math.sqrt(variance) if freedom else math.inf


def _squares(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _exp(power: float) -> float:
    return math.inf if power > 700.0 else math.exp(power)
