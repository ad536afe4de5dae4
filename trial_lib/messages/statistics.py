"""Ratios with intervals: of rounds that measured both things, and of two studies."""

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@functools.cache
def t_quantile(probability: float, degrees: int) -> float:
    """Returns the quantile of Student's t distribution.

    The distribution function is the finite sum of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3
    (odd degrees of freedom) and 26.7.4 (even ones), inverted by bisection.

    Args:
        probability: of a smaller value, between 0.5 and 1, both excluded.
        degrees: of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2
    # The bisection reaches the angle's last bit earlier.
    for _ in range(80):
        middle = (low + high) / 2
        if (1 + _central_probability(middle, degrees)) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for power in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


# Ratios with intervals, from rounds that measured both things.

SURE = statistics.NormalDist().inv_cdf(0.8)
"""So many standard deviations make an event come in 80 of 100 cases, which is called probably."""


@dataclass(frozen=True)
class Ratio:
    value: float  # over all rounds
    low: float  # the interval's lower end; 0 for a single round
    high: float  # its upper end; infinite for a single round
    noise: float = math.inf  # the standard deviation of the logarithm in one round
    freedom: int = 0  # the degrees of freedom of that noise

    @property
    def spread(self) -> float:
        """Half the interval's width, as a share of the value."""
        return (self.high - self.low) / 2.0 / self.value


def ratios_to(
    reference: str, rounds: Sequence[Mapping[str, float]], error: float, before: Ratio | None = None
) -> dict[str, Ratio]:
    """Returns the ratio of everything else to the reference, by name: of all work to all time of the rounds.

    Each round has the same work for all things, and other work than the next round. A training pays for all of it, so
    a long round counts more than a short one. Where rounds are alike, this is the geometric mean of their ratios.

    Student's t on the jackknife's values of the logarithms (Cochran, Sampling Techniques, 6.17). Two or more things
    share the estimate of the noise, the mean of their variances. It knows the less, the more their ratios vary together
    because of the reference. A thing that varies more than the others gets the larger variance of its own ratios.

    Args:
        rounds: the positive measurements of each round, by name, as work per time. All rounds have the same names.
        error: the probability that one interval misses the true value.
        before: a ratio of earlier rounds, of the same kind. What is known of its noise counts too.
    """
    count = len(rounds)
    times = {name: [1.0 / row[name] for row in rounds] for name in rounds[0]}
    added = {name: _added_by_each(seconds) for name, seconds in times.items()}
    logs = {
        name: [ours - theirs for ours, theirs in zip(added[name], added[reference], strict=True)]
        for name in times.keys() - {reference}
    }
    variances = {name: statistics.variance(values) if count > 1 else math.inf for name, values in logs.items()}
    shared, freedom = statistics.fmean(variances.values()), count - 1
    if len(logs) > 1 and 0.0 < shared < math.inf:
        things = len(logs)
        # Of the sum of k things the variance is k + k (k - 1) r times that of one, with their correlation r. A mean of
        # k variances has as many degrees of freedom as k / (1 + (k - 1) r**2) of them.
        of_sum = statistics.variance([sum(values) for values in zip(*logs.values(), strict=True)])
        together = min(max((of_sum / things / shared - 1.0) / (things - 1), 0.0), 1.0)
        freedom = int((count - 1) * things / (1.0 + (things - 1) * together**2))
    if before is not None and before.freedom and count > 1:
        shared = (freedom * shared + before.freedom * before.noise**2) / (freedom + before.freedom)
        freedom += before.freedom
    found = {}
    for name in logs:
        mean, noise = math.log(sum(times[reference]) / sum(times[name])), math.sqrt(max(shared, variances[name]))
        half = t_quantile(1.0 - error / 2.0, freedom) * noise / math.sqrt(count) if count > 1 else math.inf
        found[name] = Ratio(math.exp(mean), _exp(mean - half), _exp(mean + half), noise, freedom)
    return found


def chance_to_tell(gain: Ratio, rounds: int, later: int, error: float, worth: float) -> float:
    """Returns the probability that after more rounds the interval of a gain is above 1, or below a gain of any worth.

    It follows from the effect and the noise that these rounds have shown, and from nothing known beforehand.

    Args:
        gain: of `rounds` rounds, at least two.
        later: the number of all rounds then.
        error: of the interval then.
    """
    half = _half_later(gain, rounds, later, error)
    between = gain.noise * math.sqrt(1 / rounds - 1 / later)  # this mean and the later one

    def above(bound: float) -> float:
        angle = math.atan2(math.log(gain.value) - bound, between * math.sqrt(gain.freedom))
        return (1.0 + math.copysign(_central_probability(abs(angle), gain.freedom), angle)) / 2.0

    return min(1.0, above(half) + 1.0 - above(math.log(worth) - half))


def rounds_to_tell(gain: Ratio, rounds: int, error: float, worth: float, most: int) -> tuple[int, float]:
    """Returns how many more rounds probably tell the same, if the true gain is the one that these rounds have shown.

    Probably: in at least 80 of 100 cases. If not even `most` rounds in all suffice, it returns 0, and the noise with
    which so many would, from the first one on. The other arguments are those of `chance_to_tell`.
    """
    # The noise itself is known from a few rounds only.
    noisier = replace(gain, noise=gain.noise * (1.0 + SURE / math.sqrt(2.0 * gain.freedom)))
    distance = max(math.log(gain.value), math.log(worth / gain.value))

    def reach(later: int, new: int) -> float:
        return _half_later(noisier, rounds, later, error) + SURE * noisier.noise * math.sqrt(new) / later

    more = next((new for new in range(1, most - rounds + 1) if reach(rounds + new, new) <= distance), 0)
    return more, 0.0 if more else gain.noise * distance / reach(most, most)


def _half_later(gain: Ratio, rounds: int, later: int, error: float) -> float:
    # Half of the interval after `later` rounds, in logarithms, if the noise stays.
    freedom = max(1, gain.freedom * (later - 1) // (rounds - 1))
    return t_quantile(1.0 - error / 2.0, freedom) * gain.noise / math.sqrt(later)


def _added_by_each(seconds: Sequence[float]) -> list[float]:
    # The values of the jackknife for minus the logarithm of their mean: n of that of all, less n - 1 of the rest's.
    whole, count = sum(seconds), len(seconds)
    if count == 1:
        return [-math.log(whole)]
    return [(count - 1) * math.log((whole - each) / (count - 1)) - count * math.log(whole / count) for each in seconds]


def mean_rate(values: Sequence[float], error: float) -> Ratio:
    """Returns all work over all time of measurements (work per time, one of each process), with its interval."""
    return ratios_to("one", [{"one": 1.0, "value": value} for value in values], error)["value"]


def _exp(power: float) -> float:
    return math.inf if power > 700.0 else math.exp(power)


# The latest studies beside the best level that earlier ones held.

# The share of studies without a change that are called a fall, for each place where it may begin: 0 to 0.7 false alarms
# in histories of 100 studies (`python -m benchmarks.confirm_aa.nights`).
_FALSE_ALARM = 0.002
_PRIOR_STUDIES = 3.0  # what is known beforehand of the variation from study to study counts as much as these
_ENOUGH_STEPS = 5  # of them, the median of the steps from study to study tells more than their squares


@dataclass(frozen=True)
class Fall:
    """How far the latest studies are below the best level that earlier ones held: a change point of the history.

    The interval holds for all levels of the history and all beginnings of the fall together, so it may be looked at
    after every study.
    """

    ratio: Ratio
    first: int  # of the studies that held the level, by its place in the history
    begin: int  # of the fall: the place after the last study that held the level


def largest_fall(studies: Sequence[Sequence[float]], unknown: float, earliest: int = 1) -> Fall:
    """The fall that is furthest beyond the noise, of two studies or more. A rise, and what it hides, is no fall.

    Args:
        studies: the positive measurements of each study's processes, oldest first.
        unknown: the standard deviation from study to study, as a share, before the studies show it.
        earliest: the first place where the fall may begin.
    """
    levels = [statistics.fmean(math.log(value) for value in values) for values in studies]
    deviation = math.sqrt(_variance_between(levels[:-1], unknown))
    bound = statistics.NormalDist().inv_cdf(1.0 - _FALSE_ALARM / (len(levels) - 1))
    falls = []
    for begin in range(earliest, len(levels)):
        now = statistics.fmean(levels[begin:])
        for first in range(begin):
            error = deviation * math.sqrt(1 / (begin - first) + 1 / (len(levels) - begin))
            falls.append(((now - statistics.fmean(levels[first:begin])) / error, error, first, begin))
    score, error, first, begin = min(falls)
    fall, half = score * error, bound * error
    return Fall(Ratio(math.exp(fall), math.exp(fall - half), _exp(fall + half)), first, begin)


def _variance_between(levels: Sequence[float], unknown: float) -> float:
    # Steps from study to study hold twice the variance, whatever the level; what they have in common is a trend.
    steps = [later - earlier for earlier, later in itertools.pairwise(levels)]
    if len(steps) < 2:
        return unknown**2
    if len(steps) <= _ENOUGH_STEPS:
        seen, weight = statistics.variance(steps) / 2, (len(steps) - 1) * 2 / 3
    else:
        # One jump, as of a repaired program, is no variation. 0.6745: the quartile of the normal distribution. A
        # variance from the median knows as much as one from 0.37 as many squares.
        middle = statistics.median(steps)
        spread = statistics.median(abs(step - middle) for step in steps) / 0.6745
        seen, weight = spread**2 / 2, (len(steps) - 1) * 0.37
    return (_PRIOR_STUDIES * unknown**2 + weight * seen) / (_PRIOR_STUDIES + weight)
