"""Ratios with intervals, from rounds that measured both things. Pure.

A machine drifts. So values are compared within one round, and the logarithms of the ratios are averaged over the
rounds. Each value is from a process of its own. Steps of one process are no repeats, because its memory layout, cores
and neighbours are one draw for all of them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trial_lib.statistics.student_t import t_quantile


@dataclass(frozen=True)
class Ratio:
    """A ratio with its confidence interval.

    Attributes:
        value: geometric mean over the rounds.
        low: the interval's lower end; 0 for a single round.
        high: its upper end; infinite for a single round.
    """

    value: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the interval's width, as a share of the value."""
        return (self.high - self.low) / 2.0 / self.value

    def overlaps(self, other: "Ratio") -> bool:
        """Returns whether two intervals have a value in common."""
        return self.low <= other.high and other.low <= self.high


def ratios_to(reference: str, rounds: Sequence[Mapping[str, float]], error: float) -> dict[str, Ratio]:
    """Returns the ratio of everything else to the reference, by name.

    Student's t on the logarithms of the rounds' ratios. Two or more things share the estimate of the noise. Its
    variance is the residual of the additive model (thing + round), with (things - 1) * (rounds - 1) degrees of freedom.
    A thing that varies more than the others gets the larger variance of its own ratios.

    Args:
        reference: the name of the reference.
        rounds: the positive measurements of each round, by name. All rounds have the same names.
        error: the probability that one interval misses the true value.
    """
    count = len(rounds)
    logs = {name: [math.log(row[name]) for row in rounds] for name in rounds[0]}
    shared = 2.0 * _residual_variance(list(logs.values())) if count > 1 else 0.0
    found = {}
    for name in logs.keys() - {reference}:
        differences = [ours - theirs for ours, theirs in zip(logs[name], logs[reference], strict=True)]
        mean = statistics.fmean(differences)
        half = math.inf
        if count > 1:
            variance = max(shared, statistics.variance(differences))
            half = t_quantile(1.0 - error / 2.0, (len(logs) - 1) * (count - 1)) * math.sqrt(variance / count)
        found[name] = Ratio(math.exp(mean), _exp(mean - half), _exp(mean + half))
    return found


def geometric_mean(values: Sequence[float], error: float) -> Ratio:
    """Returns the geometric mean of repeated measurements with its interval, without a reference.

    Args:
        values: one of each process, positive.
        error: the probability that the interval misses the true value.
    """
    return ratios_to("one", [{"one": 1.0, "value": value} for value in values], error)["value"]


def _residual_variance(rows: Sequence[Sequence[float]]) -> float:
    """Returns the variance of a table without the means of its rows and columns."""
    columns = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    whole = statistics.fmean(columns)
    left = [
        (value - statistics.fmean(row) - column + whole) ** 2
        for row in rows
        for value, column in zip(row, columns, strict=True)
    ]
    return sum(left) / ((len(rows) - 1) * (len(columns) - 1))


def _exp(power: float) -> float:
    return math.inf if power > 700.0 else math.exp(power)
