"""The expected cost of a candidate and its uncertainty: a Gaussian process over the lineages and their sizes.

The cost is the logarithm of the quantity to minimise: of the metric, or of its inverse if more is better. In logarithms
the effects of knobs add up, and a difference of 0.01 is 1 %.

An optimizer step of g micro-batches of m samples takes g * (a + b * m): a for launches and messages, b for a sample. So
a sample costs b * (1 + h / m) with h = a / b, the size at which overhead and work are equal. That is the mean of the
process. The covariance describes the further effects of arms, knobs and sizes. A measurement of an arm informs about
the arms that share its stage or its offload. The effect of a knob in one arm is partly expected in the others. See
Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), chapters 2 and 5.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from math import log

import numpy as np
import numpy.typing as npt

from trial_lib.search.space_coordinates import Array, SpaceCoordinates

# Prior standard deviations in logarithms: of the level, of a coarse knob, of an arm's own part, of the overhead's share
# in an arm, of a departure from the curve over sizes (caches, kernels) for all arms and for one.
_LEVEL, _COARSE, _ARM, _OVERHEAD, _CURVE, _ARM_CURVE = 3.0, 0.1, 0.08, 0.2, 0.05, 0.1
_CURVE_OCTAVES = 1.5
# The share of an arm's own part that arms with other switches of the program have as well. A compiled model, or one
# that recomputes, sends the same gradients. By replay of the clusters with switches (benchmarks/replay).
_SWITCHED_SHARE = 0.85
# The expected cost of a fine knob that is not at its best guess, and its standard deviation. The knobs share it,
# because a space whose best guesses are good for one knob has good ones for others.
_DEPARTURE, _DEPARTURE_DEVIATION = 0.005, 0.02
# The shares of a fine knob's variance that belong to an arm alone, and to a single lineage. Then the decay of likeness
# from one end of a knob's values to the other.
_ARM_SHARE, _LINEAGE_SHARE, _STEP = 0.5, 0.25, 2.0
# Priors of the fitted numbers: centre and width of their logarithms.
_HALF_SIZES = tuple(2.0**power for power in range(-1, 9))
HALF_SIZE = 8.0
"""Samples of a micro-batch whose overhead and work are equal, before anything is measured."""
_HALF_SIZE_PRIOR = (log(HALF_SIZE), 1.2)
_FINE = (0.02, 0.05, 0.12)
_FINE_PRIOR = (log(0.06), 0.7)
_NOISES = (0.01, 0.02, 0.04, 0.08, 0.16)
_NOISE_PRIOR = (log(0.04), 0.7)
# The number of measured points that compete for the answer. Then the deviations of a measurement, in standard
# deviations, with their weights (Gauss-Hermite quadrature).
_RIVALS = 10
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(12)
_SURPRISES = (_NODES, _WEIGHTS / _WEIGHTS.sum())
# Covariances are computed in blocks of this many points, although not all of them are needed.
_AT_ONCE = 64
# Few measurements do not determine these. Predictions are averaged over their most probable settings.
_FITTED_ON, _AVERAGED = 48, 6


@dataclass(frozen=True)
class Point:
    """A lineage (number of its arm, index there) at a micro-batch size (samples)."""

    arm: int
    index: int
    size: int


@dataclass(frozen=True)
class Prediction:
    """The prediction for some points, in logarithms of the cost.

    Attributes:
        mean: the expected cost, without noise.
        gain: the expected fall of the answer's cost if the point is measured (knowledge gradient for correlated
            beliefs, Frazier et al., INFORMS Journal on Computing 21 (2009) 599; the answer is a measured point). If
            measurements are noisy, one of them gains less than the point may be worth.
    """

    mean: Array
    gain: Array


@dataclass(frozen=True)
class _Scales:
    half_size: float
    fine: float
    noise: float


@dataclass(frozen=True)
class _Relations:
    """The relations of two sets of points, apart from the fitted numbers."""

    fixed: Array
    fine: Array
    same_arm: Array
    sizes: Array
    other_sizes: Array

    def covariance(self, scales: _Scales) -> Array:
        overheads = np.outer(_overhead(self.sizes, scales.half_size), _overhead(self.other_sizes, scales.half_size))
        covariance: Array = self.fixed + scales.fine**2 * self.fine + _OVERHEAD**2 * self.same_arm * overheads
        return covariance


@dataclass(frozen=True)
class _Process:
    """The process under one setting of the fitted numbers."""

    scales: _Scales
    weight: float
    factor: Array
    weights: Array


class CostModel:
    """The process, given some measured points.

    Args:
        coordinates: of the space.
        prior_costs: the expected cost of each arm above the cheapest, before any is measured.
        grows: whether the cost grows with the micro-batch size, as the time of a step does if its batch is free.
        points: the measured ones.
        costs: of the points.
        pending: points in flight. They count as measured at their expectation.
        out: points that cannot be the answer.

    Attributes:
        rivals: the points that compete for the answer, the best expectation first.
    """

    def __init__(
        self,
        coordinates: SpaceCoordinates,
        prior_costs: Sequence[float],
        grows: bool,
        points: Sequence[Point],
        costs: Sequence[float],
        pending: Sequence[Point] = (),
        out: Container[Point] = (),
    ) -> None:
        self._coordinates = coordinates
        self._prior_costs = np.array(prior_costs)
        self._grows = grows
        self._points = list(points)
        known = np.array(costs, dtype=float)
        settings = self._fit(self._points[-_FITTED_ON:], known[-_FITTED_ON:])
        self._processes = self._condition(settings, known)
        if pending:
            known = np.concatenate([known, self.expected(pending)])
            self._points += pending
            self._processes = self._condition(settings, known)
        ranked = np.argsort(self.expected(self._points), kind="stable") if self._points else ()
        rivals = dict.fromkeys(self._points[place] for place in ranked)
        self.rivals = [point for point in rivals if point not in out][:_RIVALS]

    def predict(self, points: Sequence[Point]) -> Prediction:
        """Returns the predictions for some points. Without any known point, gains count from the dearest of them."""
        if not points:
            return Prediction(np.empty(0), np.empty(0))
        if not self.rivals:
            mean = self.expected(points)
            return Prediction(mean, mean.max() - mean)
        parts = [self._predict(points[start : start + _AT_ONCE]) for start in range(0, len(points), _AT_ONCE)]
        return Prediction(np.concatenate([part.mean for part in parts]), np.concatenate([part.gain for part in parts]))

    def _predict(self, points: Sequence[Point]) -> Prediction:
        both = [*points, *self.rivals]
        to_known, among = self._relations(self._points, both), self._relations(both, both)
        mean, gain = np.zeros(len(points)), np.zeros(len(points))
        for process in self._processes:
            scales = process.scales
            across = to_known.covariance(scales)
            means = self._prior_mean(both, scales.half_size) + across.T @ process.weights
            solved = np.linalg.solve(process.factor, across)
            covariance = among.covariance(scales) - solved.T @ solved
            mean += process.weight * means[: len(points)]
            gain += process.weight * _knowledge_gradient(means, covariance, len(points), scales.noise)
        return Prediction(mean, gain)

    def size_effect(self, arm: int, sizes: Sequence[int]) -> Array:
        """Returns the expected cost of an arm's best guess at some sizes."""
        return self.expected([Point(arm, 0, size) for size in sizes])

    def expected(self, points: Sequence[Point]) -> Array:
        """Returns the expected cost of some points, in logarithms; much less work than `predict`."""
        if not points:
            return np.empty(0)
        across = self._relations(points, self._points) if self._points else None
        mean = np.zeros(len(points))
        for process in self._processes:
            mean += process.weight * self._prior_mean(points, process.scales.half_size)
            if across is not None:
                mean += process.weight * (across.covariance(process.scales) @ process.weights)
        return mean

    # -- the process ---------------------------------------------------------------------------------------------

    def _condition(self, settings: Sequence[tuple[_Scales, float]], costs: Array) -> list[_Process]:
        if not len(costs):
            return [_Process(scales, weight, np.empty((0, 0)), np.empty(0)) for scales, weight in settings]
        processes = []
        relations = self._relations(self._points, self._points)
        for scales, weight in settings:
            covariance = relations.covariance(scales) + scales.noise**2 * np.eye(len(costs))
            factor = np.linalg.cholesky(covariance).astype(np.float64)
            residual = costs - self._prior_mean(self._points, scales.half_size)
            processes.append(
                _Process(scales, weight, factor, np.linalg.solve(factor.T, np.linalg.solve(factor, residual)))
            )
        return processes

    def _prior_mean(self, points: Sequence[Point], half_size: float) -> Array:
        arms, sizes = _columns(points)
        return (
            self._prior_costs[arms]
            + self._coordinates.fine_costs([(point.arm, point.index) for point in points])
            + _DEPARTURE * self._departures(points)
            + (np.log1p(sizes / half_size) if self._grows else np.log1p(half_size / sizes))
        )

    def _departures(self, points: Sequence[Point]) -> Array:
        return self._coordinates.departures([(point.arm, point.index) for point in points])

    def _relations(self, left: Sequence[Point], right: Sequence[Point]) -> _Relations:
        (arms, sizes), (other_arms, other_sizes) = _columns(left), _columns(right)
        octaves, other_octaves = np.log2(sizes), np.log2(other_sizes)
        same_arm = self._same_arm(arms, other_arms)
        near = np.exp(-0.5 * (np.subtract.outer(octaves, other_octaves) / _CURVE_OCTAVES) ** 2)
        coarse = _alike(self._coordinates.coarse(arms), self._coordinates.coarse(other_arms))
        fixed = _LEVEL**2 + _COARSE**2 * coarse + _ARM**2 * same_arm + (_CURVE**2 + _ARM_CURVE**2 * same_arm) * near
        fixed += _DEPARTURE_DEVIATION**2 * np.outer(self._departures(left), self._departures(right))
        lineages, at = _unique(left)
        other_lineages, other_at = _unique(right)
        knobs = _alike(self._coordinates.fine(lineages), self._coordinates.fine(other_lineages))[np.ix_(at, other_at)]
        same_lineage = np.array([[one == other for other in other_lineages] for one in lineages])[np.ix_(at, other_at)]
        fine = (1 + _ARM_SHARE * same_arm) * knobs + _LINEAGE_SHARE * same_lineage
        return _Relations(fixed, fine, same_arm, sizes, other_sizes)

    def _same_arm(self, arms: npt.NDArray[np.int64], other_arms: npt.NDArray[np.int64]) -> Array:
        """Returns 1 for points of one arm, and less for arms that differ in switches of the program alone."""
        same = np.equal.outer(arms, other_arms).astype(float)
        of_deepspeed = self._coordinates.of_deepspeed
        alike = np.equal.outer(of_deepspeed(arms), of_deepspeed(other_arms)).astype(float)
        shared: Array = same + _SWITCHED_SHARE * (alike - same)
        return shared

    # -- the fitted numbers --------------------------------------------------------------------------------------

    def _fit(self, points: Sequence[Point], costs: Array) -> list[tuple[_Scales, float]]:
        """Returns the most probable settings of a grid, each with its share of the probability."""
        settings = list(starmap(_Scales, product(_HALF_SIZES, _FINE, _NOISES)))
        scores = np.array([_prior(scales) for scales in settings])
        if points:
            scores += self._log_likelihoods(points, costs, settings)
        best = np.argsort(-scores, kind="stable")[:_AVERAGED]
        shares = np.exp(scores[best] - scores[best[0]])
        shares /= shares.sum()
        return [(settings[place], float(share)) for place, share in zip(best, shares, strict=True)]

    def _log_likelihoods(self, points: Sequence[Point], costs: Array, settings: Sequence[_Scales]) -> Array:
        relations, unit = self._relations(points, points), np.eye(len(points))
        factors = np.linalg.cholesky(
            np.stack([relations.covariance(scales) + scales.noise**2 * unit for scales in settings])
        )
        by_half_size = {half_size: costs - self._prior_mean(points, half_size) for half_size in _HALF_SIZES}
        residuals = np.stack([by_half_size[scales.half_size] for scales in settings])
        whitened = np.linalg.solve(factors, residuals[:, :, None])[:, :, 0]
        logarithms = np.log(np.diagonal(factors, axis1=1, axis2=2))
        scores: Array = -0.5 * np.sum(whitened**2, axis=1) - np.sum(logarithms, axis=1)
        return scores


def _prior(scales: _Scales) -> float:
    return -0.5 * sum(
        ((log(value) - centre) / width) ** 2
        for value, (centre, width) in (
            (scales.half_size, _HALF_SIZE_PRIOR),
            (scales.fine, _FINE_PRIOR),
            (scales.noise, _NOISE_PRIOR),
        )
    )


def _overhead(sizes: Array, half_size: float) -> Array:
    share: Array = np.log1p(half_size / sizes)
    return share


def _columns(points: Sequence[Point]) -> tuple[npt.NDArray[np.int64], Array]:
    return (
        np.array([point.arm for point in points], dtype=int),
        np.array([point.size for point in points], dtype=float),
    )


def _unique(points: Sequence[Point]) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the distinct lineages of some points, and the index of each point's lineage."""
    places: dict[tuple[int, int], int] = {}
    at = [places.setdefault((point.arm, point.index), len(places)) for point in points]
    return list(places), at


def _alike(left: Array, right: Array) -> Array:
    """Returns the likeness of each row of one with each row of the other: 1 for each equal coordinate."""
    distance = np.abs(left[:, None, :] - right[None, :, :])
    alike: Array = np.where(np.isnan(distance), 0.0, np.exp(-_STEP * np.nan_to_num(distance))).sum(axis=2)
    return alike


def _knowledge_gradient(means: Array, covariance: Array, points: int, noise: float) -> Array:
    """Returns for each point the expected fall of the lowest expected cost if it is measured.

    Args:
        means: expected costs, first of the points, then of the rivals, which are measured already.
        covariance: of all of them.
        points: the number of points.
        noise: standard deviation of a measurement.
    """
    own = np.maximum(np.diagonal(covariance)[:points], 1e-12)
    readings = np.sqrt(own + noise**2)
    of_rivals = covariance[:points, points:] / readings[:, None]
    expected = np.zeros(points)
    for surprise, weight in zip(*_SURPRISES, strict=True):
        lowest = (means[points:] + surprise * of_rivals).min(axis=1)
        expected += weight * np.minimum(lowest, means[:points] + surprise * own / readings)
    gain: Array = np.maximum(means[points:].min() - expected, 0.0)
    return gain
