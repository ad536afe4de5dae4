"""The ratio of one study's measurements to another's, with an interval. Pure.

Within a study, values are compared round by round, so that the drift of the machine cancels out. Between studies
nothing can be paired. A machine that is a little warmer or busier is slower for all processes of that day, and their
scatter does not show it. So the interval has a second part: the variation of one configuration from study to study.
Enough studies show it. Before that, it is assumed to be `unknown`.
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
    """Returns the ratio of this study's values to the last study's.

    Args:
        now: the measurements of this study's processes, positive.
        last: those of the last study.
        before: those of the studies before it that measured the same under the same conditions.
        unknown: the standard deviation from study to study, as a share, for too few studies.
    """
    ours, theirs = ([math.log(value) for value in values] for values in (now, last))
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    levels = [statistics.fmean(math.log(value) for value in values) for values in (*before, last)]
    freedom = len(ours) + len(theirs) - 2
    scatter = (_squares(ours) + _squares(theirs)) / freedom * (1 / len(ours) + 1 / len(theirs)) if freedom else 0.0
    if len(levels) >= _ENOUGH_STUDIES:
        # The levels' variance already contains the scatter of processes, but four levels may be close by luck.
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
