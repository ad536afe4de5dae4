"""Bayesian linear regression of measured peaks, with a prior, groups that depart from it, and censored observations.

The noise of a measurement is not known: a CPU's resident memory scatters by several percent, an allocator's count by
none. Nor is what kind of a model it is: most are as one prior says, some far off. So one regression runs for each prior
and noise level, and each counts by how well it foresaw what came.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

# Standard deviations of a measurement, as shares of its scale.
_NOISE_LEVELS = np.array([0.003, 0.01, 0.02, 0.035, 0.055, 0.08, 0.12, 0.2])


@dataclass(frozen=True)
class Mixture:
    """A mixture of normal distributions.

    Attributes:
        weights: they sum to 1.
        means: one of each.
        deviations: standard deviation of each.
    """

    weights: tuple[float, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The expectation."""
        return sum(weight * mean for weight, mean in zip(self.weights, self.means, strict=True))

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        mean = self.mean
        parts = zip(self.weights, self.means, self.deviations, strict=True)
        return math.sqrt(sum(weight * (sd * sd + (each - mean) ** 2) for weight, each, sd in parts))

    def below(self, value: float, deviation: float = 0.0) -> float:
        """Returns the probability of being below a value, which itself may be uncertain by a standard deviation."""
        parts = zip(self.weights, self.means, self.deviations, strict=True)
        below = sum(weight * normal_below((value - mean) / math.hypot(sd, deviation)) for weight, mean, sd in parts)
        return min(1.0, below)

    def quantile(self, share: float) -> float:
        """Returns the value that a share of the distribution is below."""
        low = min(mean - 9 * sd for mean, sd in zip(self.means, self.deviations, strict=True))
        high = max(mean + 9 * sd for mean, sd in zip(self.means, self.deviations, strict=True))
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.below(middle) < share else (low, middle)
        return (low + high) / 2


def normal_below(z: float) -> float:
    """Returns the standard normal distribution's probability of being below a value."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


@dataclass(frozen=True)
class Prior:
    """What the weights may be before anything was measured.

    Attributes:
        weight: how likely it is that this one is right.
        means: of the shared weights.
        deviations: their standard deviations.
    """

    weight: float
    means: tuple[float, ...]
    deviations: tuple[float, ...]


class PeakRegression:
    """Sums features times weights; each group of observations adds weights of its own to those that all share.

    An observation costs the square of the number of weights, however many came before it.

    Args:
        priors: of the weights that all groups share.
        group_deviations: prior standard deviations of what a group's weights add to the first of them.
    """

    def __init__(self, priors: Sequence[Prior], group_deviations: Sequence[float]) -> None:
        self._shared = len(priors[0].means)
        self._group_variances = np.square(group_deviations)
        self._groups: dict[Hashable, int] = {}
        levels = len(_NOISE_LEVELS)
        self._noise = np.tile(_NOISE_LEVELS, len(priors))
        self._mean = np.repeat(np.array([prior.means for prior in priors], dtype=float), levels, axis=0)
        covariances = [np.diag(np.square(np.array(prior.deviations, dtype=float))) for prior in priors]
        self._covariance = np.repeat(np.array(covariances), levels, axis=0)
        self._log_weights = np.repeat(np.log([prior.weight for prior in priors]), levels)

    def predict(self, features: Sequence[float], group: Hashable, scale: float) -> Mixture:
        """Returns what an observation would be.

        Args:
            features: as many as there are shared weights.
            group: the group it would belong to; one that is new is as likely above as below the others.
            scale: what the noise is a share of.
        """
        x = self._row(features, group)
        variances = np.einsum("i,gij,j->g", x, self._covariance, x) + np.square(self._noise * scale)
        if group not in self._groups:
            variances = variances + self._new_group_variance(features)
        weights = self._weights()
        return Mixture(tuple(weights.tolist()), tuple((self._mean @ x).tolist()), tuple(np.sqrt(variances).tolist()))

    def observe(self, features: Sequence[float], group: Hashable, scale: float, value: float) -> None:
        """Takes in a measured value."""
        x = self._joined(features, group)
        gain, mean, variance = self._gain(x, scale)
        self._log_weights -= 0.5 * (np.square(value - mean) / variance + np.log(variance))
        self._mean = self._mean + gain * (value - mean)[:, None]
        self._covariance = self._covariance - np.einsum("gi,gj,g->gij", gain, gain, variance)

    def observe_above(
        self, features: Sequence[float], group: Hashable, scale: float, bound: float, deviation: float
    ) -> None:
        """Takes in that a value was above a bound, which is known up to a standard deviation.

        What is known afterwards is no normal distribution any more; the one with the same mean and variance takes its
        place (assumed density filtering).
        """
        x = self._joined(features, group)
        gain, mean, variance = self._gain(x, scale)
        spread = np.sqrt(variance + deviation**2)
        z = (mean - bound) / spread
        above = np.maximum([normal_below(each) for each in z], 1e-300)
        ratio = np.exp(-0.5 * np.square(z)) / math.sqrt(2 * math.pi) / above
        # Far below the bound, the ratio's own asymptote.
        ratio = np.where(z < -30, -z, ratio)
        self._log_weights += np.log(above)
        self._mean = self._mean + gain * (variance * ratio / spread)[:, None]
        shrink = np.square(variance / spread) * ratio * (ratio + z)
        self._covariance = self._covariance - np.einsum("gi,gj,g->gij", gain, gain, shrink)

    def _weights(self) -> np.ndarray:
        weights = np.exp(self._log_weights - self._log_weights.max())
        normalised: np.ndarray = weights / weights.sum()
        return normalised

    def _gain(self, x: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns how far each weight moves for each unit of surprise, and mean and variance of the observation."""
        along = self._covariance @ x
        variance = along @ x + np.square(self._noise * scale)
        return along / variance[:, None], self._mean @ x, variance

    def _joined(self, features: Sequence[float], group: Hashable) -> np.ndarray:
        if group not in self._groups:
            width = len(self._group_variances)
            levels, size = self._mean.shape
            self._groups[group] = size
            self._mean = np.concatenate([self._mean, np.zeros((levels, width))], axis=1)
            grown = np.zeros((levels, size + width, size + width))
            grown[:, :size, :size] = self._covariance
            grown[:, range(size, size + width), range(size, size + width)] = self._group_variances
            self._covariance = grown
        return self._row(features, group)

    def _row(self, features: Sequence[float], group: Hashable) -> np.ndarray:
        row = np.zeros(self._mean.shape[1])
        row[: self._shared] = features
        start = self._groups.get(group)
        if start is not None:
            width = len(self._group_variances)
            row[start : start + width] = features[:width]
        return row

    def _new_group_variance(self, features: Sequence[float]) -> float:
        width = len(self._group_variances)
        return float(np.square(features[:width]) @ self._group_variances)
