"""Bayesian linear regression of measured peaks, with a prior, groups that differ from it, and censored observations.

The noise of a measurement is not known. A CPU's resident memory scatters by several percent, and an allocator's count
not at all. The kind of the model is not known either: most are near the prior, and some are far off. So one regression
runs for each prior and noise level. Each is weighted by how well it predicted the observations.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_NO_WEIGHT = 1e-6  # of a regression that the observations have ruled out
# Standard deviations of a measurement, as shares of its scale.
_NOISE_LEVELS = (0.003, 0.01, 0.02, 0.035, 0.055, 0.08, 0.12, 0.2)


@dataclass(frozen=True)
class Mixture:
    """A mixture of normal distributions."""

    weights: tuple[float, ...]  # they sum to 1
    means: tuple[float, ...]  # one of each
    deviations: tuple[float, ...]  # the standard deviation of each

    @property
    def mean(self) -> float:
        return sum(weight * mean for weight, mean in zip(self.weights, self.means, strict=True))

    @property
    def deviation(self) -> float:
        mean = self.mean
        parts = zip(self.weights, self.means, self.deviations, strict=True)
        return math.sqrt(sum(weight * (sd * sd + (each - mean) ** 2) for weight, each, sd in parts))

    def below(self, value: float, deviation: float = 0.0) -> float:
        """Returns the probability of being below a value, which may have a standard deviation of its own."""
        parts = zip(self.weights, self.means, self.deviations, strict=True)
        below = sum(
            weight * normal_below((value - mean) / math.hypot(sd, deviation))
            for weight, mean, sd in parts
            if weight > _NO_WEIGHT
        )
        return min(1.0, below)

    def quantile(self, share: float) -> float:
        low = min(mean - 9 * sd for mean, sd in zip(self.means, self.deviations, strict=True))
        high = max(mean + 9 * sd for mean, sd in zip(self.means, self.deviations, strict=True))
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.below(middle) < share else (low, middle)
        return (low + high) / 2


def normal_below(z: float) -> float:
    """Returns the standard normal distribution's probability of being below a value."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


@dataclass(frozen=True)
class Prior:
    weight: float  # its probability, in proportion to the others'
    means: tuple[float, ...]  # of the shared weights
    deviations: tuple[float, ...]  # their standard deviations
    at_once: bool = False  # whether all features peak at the same moment, so that freed memory serves nothing else


class _Peak(NamedTuple):
    """A sum, or the larger of several, in each regression: one row or number for each."""

    rows: np.ndarray  # the features; a single row if it is that of every regression
    along: np.ndarray  # covariance of the weights with the sum
    mean: np.ndarray  # the expected sum
    variance: np.ndarray  # of the sum, without noise


class PeakRegression:
    """The largest of some sums of features times weights. Each group adds its own weights to the first shared ones. A
    peak is the largest of several moments, each with its own features. The larger of two uncertain sums is treated as
    normal, with the mean and variance of Clark (Operations Research 9 (1961) 145). An observation updates the weights
    of each sum by the probability that it is the larger one. It costs the square of the number of weights, however many
    came before it.
    """

    def __init__(
        self,
        priors: Sequence[Prior],
        group_deviations: Sequence[float] = (),
        noise_levels: Sequence[float] = _NOISE_LEVELS,
    ) -> None:
        priors = sorted(priors, key=lambda prior: prior.at_once)
        self._shared = len(priors[0].means)
        self._group_variances = np.square(group_deviations)
        self._groups: dict[Hashable, int] = {}
        levels = len(noise_levels)
        self._noise = np.tile(noise_levels, len(priors))
        self._mean = np.repeat(np.array([prior.means for prior in priors], dtype=float), levels, axis=0)
        covariances = [np.diag(np.square(np.array(prior.deviations, dtype=float))) for prior in priors]
        self._covariance = np.repeat(np.array(covariances), levels, axis=0)
        self._log_weights = np.repeat(np.log([prior.weight for prior in priors]), levels)
        self._weights = normalised(self._log_weights)
        apart = levels * sum(not prior.at_once for prior in priors)
        self._apart, self._at_once = slice(apart), slice(apart, None)

    def predict(
        self,
        moments: Sequence[Sequence[float]],
        group: Hashable,
        scale: float,
        only: int | None = None,
        noise_share: float = 1.0,
    ) -> Mixture:
        """Returns the distribution of an observation. A new group is as likely above the others as below. Each moment
        has as many features as there are shared weights. `only` is the place of the one moment that is predicted. The
        noise is a share of what is expected, or at least of `scale`. `noise_share` is the part of it that the
        prediction has.
        """
        peak = self._peak(moments, group, only)
        noise = noise_share * self._noise * np.maximum(peak.mean, scale)
        deviations = np.sqrt(np.maximum(peak.variance, 0.0) + np.square(noise))
        return Mixture(self._weights, tuple(peak.mean.tolist()), tuple(deviations.tolist()))

    def observe(self, moments: Sequence[Sequence[float]], group: Hashable, scale: float, value: float) -> None:
        self._join(group)
        peak = self._peak(moments, group)
        variance = peak.variance + np.square(self._noise * np.maximum(peak.mean, scale))
        gain = peak.along / variance[:, None]
        self._weigh(-0.5 * (np.square(value - peak.mean) / variance + np.log(variance)))
        self._mean = self._mean + gain * (value - peak.mean)[:, None]
        self._covariance = self._covariance - np.einsum("gi,gj,g->gij", gain, gain, variance)

    def observe_above(
        self, moments: Sequence[Sequence[float]], group: Hashable, scale: float, bound: float, deviation: float
    ) -> None:
        """Learns that a value was above a bound, which has a standard deviation. The posterior is not normal. The
        normal distribution with the same mean and variance replaces it (assumed density filtering).
        """
        self._join(group)
        peak = self._peak(moments, group)
        variance = peak.variance + np.square(self._noise * np.maximum(peak.mean, scale))
        gain = peak.along / variance[:, None]
        spread = np.sqrt(variance + deviation**2)
        z = (peak.mean - bound) / spread
        above = np.maximum([normal_below(each) for each in z], 1e-300)
        ratio = _density(z) / above
        # Far below the bound these are the asymptotes of the ratio, and of its effect on the variance.
        far = z < -30
        ratio = np.where(far, -z, ratio)
        self._weigh(np.log(above))
        self._mean = self._mean + gain * (variance * ratio / spread)[:, None]
        shrink = np.square(variance / spread) * np.where(far, 1.0, ratio * (ratio + z))
        self._covariance = self._covariance - np.einsum("gi,gj,g->gij", gain, gain, shrink)

    def _weigh(self, log_likelihoods: np.ndarray) -> None:
        self._log_weights += log_likelihoods
        self._weights = normalised(self._log_weights)

    def _peak(self, moments: Sequence[Sequence[float]], group: Hashable, only: int | None = None) -> _Peak:
        first, *others = moments if only is None else [moments[only]]
        apart = self._moment(first, group, self._apart)
        for features in others:
            apart = _larger(apart, self._moment(features, group, self._apart))
        most = [max(feature) for feature in zip(*moments, strict=True)]
        if self._at_once.start == len(self._mean):
            return apart
        both = apart, self._moment(most, group, self._at_once)
        rows = [np.broadcast_to(peak.rows, peak.along.shape) for peak in both]
        return _Peak(np.concatenate(rows), *map(np.concatenate, list(zip(*both, strict=True))[1:]))

    def _moment(self, features: Sequence[float], group: Hashable, those: slice) -> _Peak:
        """The sum of a moment in some of the regressions. A new group has the weights of all groups."""
        means, covariance = self._mean[those], self._covariance[those]
        levels, size = means.shape
        width, start = len(self._group_variances), self._groups.get(group)
        row, own = np.zeros(size), np.array(features[:width], dtype=float)
        row[: self._shared] = features
        if start is not None:
            row[start : start + width] = own
            along, rows = covariance @ row, row
        else:
            beside = np.broadcast_to(own * self._group_variances, (levels, width))
            along, rows = np.concatenate([covariance @ row, beside], axis=1), np.concatenate([row, own])
        return _Peak(rows, along, means @ row, along @ rows)

    def _join(self, group: Hashable) -> None:
        # Gives a group weights of its own.
        if group in self._groups:
            return
        width = len(self._group_variances)
        levels, size = self._mean.shape
        self._groups[group] = size
        self._mean = np.concatenate([self._mean, np.zeros((levels, width))], axis=1)
        grown = np.zeros((levels, size + width, size + width))
        grown[:, :size, :size] = self._covariance
        grown[:, range(size, size + width), range(size, size + width)] = self._group_variances
        self._covariance = grown


def _larger(one: _Peak, other: _Peak) -> _Peak:
    # The larger of two sums (Clark's equations 2 to 6).
    covariance = np.sum(other.rows * one.along, axis=1)
    apart = np.sqrt(np.maximum(one.variance + other.variance - 2 * covariance, 1e-12))
    z = (one.mean - other.mean) / apart
    share = np.array([normal_below(each) for each in z])
    both = apart * _density(z)
    mean = one.mean * share + other.mean * (1 - share) + both
    square = (one.mean**2 + one.variance) * share + (other.mean**2 + other.variance) * (1 - share)
    variance = np.maximum(square + (one.mean + other.mean) * both - mean**2, 0.0)
    weight, rest = share[:, None], 1 - share[:, None]
    return _Peak(weight * one.rows + rest * other.rows, weight * one.along + rest * other.along, mean, variance)


def normalised(log_weights: np.ndarray) -> tuple[float, ...]:
    weights = np.exp(log_weights - log_weights.max())
    return tuple((weights / weights.sum()).tolist())


def _density(z: np.ndarray) -> np.ndarray:
    density: np.ndarray = np.exp(-0.5 * np.square(z)) / math.sqrt(2 * math.pi)
    return density
