"""The expected cost of a candidate and its uncertainty: a Gaussian process over the families and their sizes.

The cost is the logarithm of the quantity to minimise: of the metric, or of its inverse if more is better. In logarithms
the effects of knobs add up, and a difference of 0.01 is 1 %.

An optimizer step of g micro-batches of m samples takes g * (a + b * m): a for launches and messages, b for a sample. So
a sample costs b * (1 + h / m) with h = a / b, the size at which overhead and work are equal. That is the mean of the
process. The covariance describes the further effects of arms, knobs and sizes. A measurement of an arm informs about
the arms that share its stage or its offload. The effect of a knob in one arm is partly expected in the others. See
Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), chapters 2 and 5.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from zerotune.trial_lib.deepspeed_config.layout import AUTOTP
from zerotune.trial_lib.messages.turned import FUSED, WORKERS, compiles
from zerotune.trial_lib.records.switches import is_switch, path_of, switches_of
from zerotune.trial_lib.search.knobs import Arm, SearchSpace, get_knob, leaves, plain

# The expected costs of arms and fine switches before any is measured. The search looks at the cheapest first.

# Shares of a step without offload. Stages 0 to 2 send 2 values a parameter, stage 3 sends 3 (Rajbhandari et al., ZeRO,
# arXiv 1910.02054, section 7): half as much again, of a share of about a tenth. Stage 3 also gathers and releases each
# module's parameters as it runs: at its best guess it is 13 to 29 % below the best of the other stages' on the recorded
# tables (benchmarks/replay). Offload sends states or parameters over the bus in each step, and updates on the host (Ren
# et al., ZeRO-Offload, arXiv 2101.06840, section 5). Recomputed activations cost another forward pass, a third of the
# work (Chen et al., arXiv 1604.06174).
_ARM_PRIORS_STAGE = {0: 0.0, 1: 0.01, 2: 0.02, 3: 0.15}
_OFFLOAD = {"offload_optimizer": 0.25, "offload_param": 0.25}
_RECOMPUTED = 1 / 3
# The same forward pass, of all blocks or of half. A fused attention kernel saves the reading and writing of the scores
# (Dao et al., FlashAttention, arXiv 2205.14135: 15 % of BERT's training, and more with the length). The options are
# those of a Hugging Face Trainer.
_SWITCHED = {
    ("model:activation_checkpointing", "full"): _RECOMPUTED,
    ("model:activation_checkpointing", "every_second"): _RECOMPUTED / 2,
    ("--gradient_checkpointing", True): _RECOMPUTED,
    ("model:attention", "eager"): 0.15,
    ("--attn_implementation", "eager"): 0.15,
}
# Llama 3.1 8B on 8 H100: 6,667 tokens/s compiled, 5,762 without (torchtitan, docs/performance.md, December 2024). Half
# of it is expected here, because graph breaks and short steps lose some.
_COMPILED = log(5762 / 6667) / 2
# Tokens/s on a GPU at tensor-parallel groups of 2, 4, 8, 16 and 32: 14,167, 13,460, 10,889, 6,159 and 3,610 (Hugging
# Face, The Ultra-Scale Playbook, 2025). No figure is given without groups, so the first doubling counts as the second.
_TENSOR_PARALLEL = {1: 0.0, 2: 0.05, 4: 0.1, 8: 0.35, 16: 1.35, 32: 2.95}

# Fine switches whose effect has one direction: the expected cost of the value at the wrong end. The workers vary
# only if the program waits at least 3 % of a step for its data (trial_lib/rank/surveys.py), and some programs
# wait far longer. On a GPU one kernel that updates all parameters saves launches and passes over them: PyTorch's
# documentation of Adam expects `fused` to be the fastest form there. It says nothing of a CPU: the best candidate of
# small_llama (benchmarks/replay) has no fused form. Both figures are assumptions.
_NO_WORKERS, _NOT_FUSED = 0.05, 0.02
ONE_WAY = {"cuda": frozenset([path_of(WORKERS), path_of(FUSED)]), "cpu": frozenset([path_of(WORKERS)])}
"""The paths of these switches, by device."""


def fine_cost(path: str, value: Any, values: Sequence[Any], device: str) -> float:
    """Returns the expected cost of a fine knob's value beside its best one, as a logarithm; 0 if none is expected."""
    if path == path_of(WORKERS):
        numbers = [each for each in values if isinstance(each, int)]  # None leaves the program's own
        return _NO_WORKERS * (1 - value / max(1, *numbers)) if len(numbers) > 1 and value is not None else 0.0
    is_known = path == path_of(FUSED) and path in ONE_WAY[device]
    return _NOT_FUSED if is_known and value is False and True in values else 0.0


def prior_costs(arms: Sequence[Arm]) -> list[float]:
    """Returns the expected cost of each arm of a space beside stage 0 as it is, as a logarithm. The user's arm gets no
    advantage. Every study measures it anyway, so another arm teaches more.
    """
    return [_prior_cost(arm) for arm in arms]


def _prior_cost(arm: Arm) -> float:
    share = _ARM_PRIORS_STAGE[arm.stage]
    for section, cost in _OFFLOAD.items():
        if get_knob(arm.knobs, f"zero_optimization.{section}.device") not in (None, "none"):
            share += cost
    if any(get_knob(arm.knobs, f"activation_checkpointing.{key}") for key in ("enabled", "partition_activations")):
        share += _RECOMPUTED
    switches = switches_of(arm.knobs)
    share += sum(_SWITCHED.get(each, 0.0) for each in switches.items())
    group = get_knob(arm.knobs, AUTOTP) or 1
    share += max(cost for size, cost in _TENSOR_PARALLEL.items() if size <= group)
    return log(1 + share) + (_COMPILED if compiles(switches) else 0.0)


# Coordinates of families.

Array = npt.NDArray[np.float64]

# Values without an order are so far apart that they share nothing.
_APART = 100.0
# Values of a switch whose effect has one direction are so much nearer, because they surprise less. This was set by
# hand. With 0.1, 0.25 and 0.5 the search is within 3 % on compiled_store after 7, 6 and 4 trials, and on slow_store
# after 2 (benchmarks/replay, 6 seeds).
_ONE_WAY_STEP = 0.25


class SpaceCoordinates:
    """Coordinates of every family (number of its arm, index there) of a space. A numeric knob has the ranks of its
    values, from 0 to 1. The values of another knob are all equally far apart. NaN means that an arm does not have the
    knob.
    """

    def __init__(self, space: SearchSpace, device: str = "cuda") -> None:
        self.arms = space.arms
        self._device = device
        coarse = [dict(leaves(arm.knobs)) for arm in self.arms]
        paths = sorted({path for settings in coarse for path in settings})
        values = {path: [plain(settings.get(path)) for settings in coarse] for path in paths}
        self._coarse = np.array(
            [
                [_distinct(values[path]).index(values[path][arm]) * _APART for path in paths]
                for arm in range(len(coarse))
            ]
        ).reshape(len(coarse), len(paths))
        without = [{path: value for path, value in settings.items() if not is_switch(path)} for settings in coarse]
        self._of_deepspeed = np.array([without.index(settings) for settings in without], dtype=np.int64)
        # Coarse knobs that all arms have alike.
        self.constant = sum(len(_distinct(values[path])) == 1 for path in paths)
        self._paths = sorted({knob.path for arm in self.arms for knob in arm.fine})
        self._scales = {
            path: _scale(
                [value for arm in self.arms for knob in arm.fine if knob.path == path for value in knob.values],
                path in ONE_WAY[device],
            )
            for path in self._paths
        }
        self._known: dict[tuple[int, int], tuple[Array, int, float]] = {}

    def coarse(self, arms: Iterable[int]) -> Array:
        return self._coarse[list(arms)]

    def of_deepspeed(self, arms: Iterable[int]) -> npt.NDArray[np.int64]:
        """Returns a number for the coarse DeepSpeed settings of each of some arms, whatever their switches."""
        numbers: npt.NDArray[np.int64] = self._of_deepspeed[list(arms)]
        return numbers

    def fine(self, families: Sequence[tuple[int, int]]) -> Array:
        return np.array([self._of(family)[0] for family in families]).reshape(len(families), len(self._paths))

    def departures(self, families: Iterable[tuple[int, int]]) -> Array:
        """Returns for each family the number of fine knobs that are not at their best guess."""
        return np.array([self._of(family)[1] for family in families], dtype=float)

    def fine_costs(self, families: Iterable[tuple[int, int]]) -> Array:
        return np.array([self._of(family)[2] for family in families], dtype=float)

    def _of(self, family: tuple[int, int]) -> tuple[Array, int, float]:
        # The fine coordinates, the knobs away from their best guess, and the expected cost of all fine knobs.
        if family not in self._known:
            number, index = family
            row, departures, cost = np.full(len(self._paths), np.nan), 0, 0.0
            for knob, position in self.arms[number].positions(index):
                value = knob.values[position]
                row[self._paths.index(knob.path)] = self._scales[knob.path][repr(value)]
                departures += position > 0
                cost += fine_cost(knob.path, value, knob.values, self._device)
            self._known[family] = row, departures, cost
        return self._known[family]


def _scale(values: Sequence[Any], is_one_way: bool) -> dict[str, float]:
    distinct = _distinct(values)
    if is_one_way and None not in distinct:
        return {repr(value): rank * _ONE_WAY_STEP for rank, value in enumerate(sorted(distinct, key=float))}
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in distinct):
        last = max(1, len(distinct) - 1)
        return {repr(value): rank / last for rank, value in enumerate(sorted(distinct))}
    return {repr(value): rank * _APART for rank, value in enumerate(distinct)}


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())


# Prior standard deviations in logarithms: of the level, of a coarse knob, of an arm's own part, of the overhead's share
# in an arm, of a departure from the curve over sizes (caches, kernels) for all arms and for one.
_LEVEL, _COARSE, _ARM, _OVERHEAD, _CURVE, _ARM_CURVE = 3.0, 0.1, 0.08, 0.2, 0.05, 0.1
# The costs that formulas expect of arms may be off, each for itself, by this share of them: the further behind an arm
# is expected, the less sure that is. A plan states how far the speed of each arm is off.
_OWN_SHARE = 0.2
# All costs may be wrong together, even in their order. Their weight is 1, with one of these deviations. A plan's speeds
# may also be off by so many times as much as it states, which is as wide as the whole intervals of its speeds are. And
# its order may say nothing. Each case has its probability before any trial: the weight's deviation, the times, the
# part of the differences that is expected.
_OF_FORMULAS = {(0.3, 1.0, 1.0): 0.85, (1.5, 1.0, 1.0): 0.15}
_OF_A_PLAN = {(0.3, 1.0, 1.0): 0.67, (0.3, 4.0, 1.0): 0.18, (0.3, 4.0, 0.0): 0.15}
_CURVE_OCTAVES = 1.5
# The ends of a plan's 90 % interval are so far apart (logarithm): a factor of two either way.
_FARTHEST = 1.5
# The share of an arm's own part that arms with other switches of the program have as well. A compiled model, or one
# that recomputes, sends the same gradients. By replay of the clusters with switches (benchmarks/replay).
_SWITCHED_SHARE = 0.85
# The expected cost of a fine knob that is not at its best guess, and its standard deviation. The knobs share it,
# because a space whose best guesses are good for one knob has good ones for others.
_DEPARTURE, _DEPARTURE_DEVIATION = 0.005, 0.02
# The shares of a fine knob's variance that belong to an arm alone, and to a single family. Then the decay of likeness
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
# Few measurements do not determine these. Predictions are averaged over the most probable settings with each weight of
# the expected costs, however unlikely, because an unlikely one decides what a wrong order may cost.
_FITTED_ON, _AVERAGED, _NEGLIGIBLE = 48, 4, 1e-4


@dataclass(frozen=True)
class Point:
    """A family (number of its arm, index there) at a micro-batch size (samples)."""

    arm: int
    index: int
    size: int


@dataclass(frozen=True)
class PlannedCosts:
    """What a plan foresees of one arm."""

    sizes: Sequence[int]  # micro-batch sizes (samples), ascending
    costs: Sequence[float]  # of a sample at each of them, in logarithms
    deviation: float  # of these logarithms beside those of other arms


@dataclass(frozen=True)
class Prediction:
    """The prediction for some points, in logarithms of the cost."""

    mean: Array  # the expected cost, without noise
    # The expected fall of the answer's cost if the point is measured (knowledge gradient for correlated beliefs,
    # Frazier et al., INFORMS Journal on Computing 21 (2009) 599; the answer is a measured point). If measurements are
    # noisy, one of them gains less than the point may be worth.
    gain: Array


@dataclass(frozen=True)
class _Scales:
    half_size: float
    fine: float
    noise: float
    weight: float  # the deviation of the weight that the arms' expected costs have
    errors: float  # how many times as far as usual the expected costs of arms and sizes are off
    trust: float  # the part of the arms' expected costs that counts


@dataclass(frozen=True)
class _Relations:
    """The relations of two sets of points, apart from the fitted numbers."""

    fixed: Array
    errors: Array
    usual: Array
    fine: Array
    same_arm: Array
    sizes: Array  # each point's own, and the nearest one with a planned cost. That is infinite if there is none.
    other_sizes: Array

    def covariance(self, scales: _Scales) -> Array:
        overheads = np.outer(_overhead(self.sizes, scales.half_size), _overhead(self.other_sizes, scales.half_size))
        covariance: Array = self.fixed + scales.weight**2 * self.usual + scales.fine**2 * self.fine
        covariance += scales.errors**2 * self.errors + _OVERHEAD**2 * overheads * self.same_arm
        return covariance


@dataclass(frozen=True)
class _Process:
    """The process under one setting of the fitted numbers."""

    scales: _Scales
    weight: float
    factor: Array
    weights: Array


class CostModel:
    """The process, given some measured points. `rivals` compete for the answer, the best expectation first. The prior
    costs are those of arms above the cheapest, before any is measured. The cost `grows` with the micro-batch size, as
    the time of a step does if its batch is free, or falls with it. Pending points are in flight, and count as measured
    at their expectation. Points that are `out` cannot be the answer. The `planned` arms have a plan's costs on the same
    level, by the arm's number.
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
        planned: Mapping[int, PlannedCosts] | None = None,
    ) -> None:
        self._coordinates = coordinates
        self._planned = planned or {}
        self._orders = _OF_A_PLAN if planned else _OF_FORMULAS
        costs_of_arms = [
            min(self._planned[arm].costs) if arm in self._planned else cost for arm, cost in enumerate(prior_costs)
        ]
        self._least = min(costs_of_arms)
        self._prior_costs = np.array(costs_of_arms) - self._least
        # The deviation of each arm's own part and those of its coarse knobs, beside the usual one.
        differing = coordinates.coarse([0]).shape[1] - coordinates.constant
        usual = float(np.sqrt(_COARSE**2 * differing + _ARM**2))
        self._off = np.array(
            [self._planned[arm].deviation / usual if arm in self._planned else 1.0 for arm in range(len(prior_costs))]
        )
        self._grows = grows
        self._points = list(points)
        known = self._within_intervals(np.array(costs, dtype=float))
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
            means = self._prior_mean(both, scales) + across.T @ process.weights
            solved = np.linalg.solve(process.factor, across)
            covariance = among.covariance(scales) - solved.T @ solved
            mean += process.weight * means[: len(points)]
            gain += process.weight * _knowledge_gradient(means, covariance, len(points), scales.noise)
        return Prediction(mean, gain)

    def expected(self, points: Sequence[Point]) -> Array:
        """Returns the expected cost of some points, in logarithms; much less work than `predict`."""
        if not points:
            return np.empty(0)
        across = self._relations(points, self._points) if self._points else None
        mean = np.zeros(len(points))
        for process in self._processes:
            mean += process.weight * self._prior_mean(points, process.scales)
            if across is not None:
                mean += process.weight * (across.covariance(process.scales) @ process.weights)
        return mean

    @property
    def noise(self) -> float:
        """The standard deviation of a reading."""
        return sum(process.weight * process.scales.noise for process in self._processes)

    def difference(self, one: Point, other: Point) -> tuple[float, float]:
        """Returns the expected cost of one point above that of another, and its standard deviation."""
        both = [one, other]
        to_known, among, apart = self._relations(self._points, both), self._relations(both, both), np.array([1.0, -1.0])
        means, variances, weights = [], [], [process.weight for process in self._processes]
        for process in self._processes:
            across = to_known.covariance(process.scales)
            solved = np.linalg.solve(process.factor, across)
            expected = self._prior_mean(both, process.scales) + across.T @ process.weights
            means.append(float(apart @ expected))
            variances.append(float(apart @ (among.covariance(process.scales) - solved.T @ solved) @ apart))
        mean = float(np.average(means, weights=weights))
        spread = np.average(np.array(variances) + (np.array(means) - mean) ** 2, weights=weights)
        return mean, float(np.sqrt(max(spread, 0.0)))

    # -- the process ---------------------------------------------------------------------------------------------

    def _condition(self, settings: Sequence[tuple[_Scales, float]], costs: Array) -> list[_Process]:
        if not len(costs):
            return [_Process(scales, weight, np.empty((0, 0)), np.empty(0)) for scales, weight in settings]
        processes = []
        relations = self._relations(self._points, self._points)
        for scales, weight in settings:
            covariance = relations.covariance(scales) + scales.noise**2 * np.eye(len(costs))
            factor = np.linalg.cholesky(covariance).astype(np.float64)
            residual = costs - self._prior_mean(self._points, scales)
            processes.append(
                _Process(scales, weight, factor, np.linalg.solve(factor.T, np.linalg.solve(factor, residual)))
            )
        return processes

    def _prior_mean(self, points: Sequence[Point], scales: _Scales) -> Array:
        arms, sizes = _columns(points)
        return (
            scales.trust * self._costs_of_arms(arms, sizes)
            + self._coordinates.fine_costs([(point.arm, point.index) for point in points])
            + _DEPARTURE * self._departures(points)
            + _overhead(self._sizes(arms, sizes), scales.half_size)
            + (np.log(sizes / scales.half_size) if self._grows else 0.0)
        )

    def _costs_of_arms(self, arms: npt.NDArray[np.int64], sizes: Array) -> Array:
        costs: Array = self._prior_costs[arms]
        for arm in self._planned.keys() & set(arms.tolist()):
            its, ours = self._planned[arm], arms == arm
            costs[ours] = np.interp(np.log2(sizes[ours]), np.log2(its.sizes), its.costs) - self._least
        return costs

    def _within_intervals(self, costs: Array) -> Array:
        """The costs, but far above the best and the plan's alike no further than the ends of an interval are apart. A
        trial may be many times slower than foreseen, and hardly ever as much faster. That it is slow says something of
        others, and how slow it is does not.
        """
        arms, sizes = _columns(self._points)
        are_planned, foreseen = np.isin(arms, list(self._planned)), self._costs_of_arms(arms, sizes)
        if not are_planned.any():
            return costs
        most = foreseen + (costs - foreseen)[are_planned].min() + _FARTHEST
        return np.where(are_planned, np.minimum(costs, np.maximum(most, costs.min() + _FARTHEST)), costs)

    def _sizes(self, arms: npt.NDArray[np.int64], sizes: Array) -> Array:
        nearest = np.full(len(arms), np.inf)
        for arm in self._planned.keys() & set(arms.tolist()):
            planned, ours = self._planned[arm].sizes, arms == arm
            nearest[ours] = np.clip(sizes[ours], planned[0], planned[-1])
        return np.array([sizes, nearest])

    def _departures(self, points: Sequence[Point]) -> Array:
        return self._coordinates.departures([(point.arm, point.index) for point in points])

    def _relations(self, left: Sequence[Point], right: Sequence[Point]) -> _Relations:
        (arms, sizes), (other_arms, other_sizes) = _columns(left), _columns(right)
        octaves, other_octaves = np.log2(sizes), np.log2(other_sizes)
        same_arm = self._same_arm(arms, other_arms)
        near = np.exp(-0.5 * (np.subtract.outer(octaves, other_octaves) / _CURVE_OCTAVES) ** 2)
        coarse = _alike(self._coordinates.coarse(arms), self._coordinates.coarse(other_arms))
        off, other_off = self._off[arms], self._off[other_arms]
        are_formulas = np.outer(*(np.isin(each, list(self._planned), invert=True) for each in (arms, other_arms)))
        # What all arms of a plan have alike is a part of their level.
        coarse -= self._coordinates.constant * ~are_formulas
        errors = np.outer(off, other_off) * (_COARSE**2 * coarse + _ARM**2 * same_arm)
        errors += (_CURVE**2 + _ARM_CURVE**2 * same_arm) * near
        usual = np.outer(self._prior_costs[arms], self._prior_costs[other_arms])
        fixed = _LEVEL**2 + _OWN_SHARE**2 * usual * same_arm * are_formulas
        fixed += _DEPARTURE_DEVIATION**2 * np.outer(self._departures(left), self._departures(right))
        families, at = _unique(left)
        other_families, other_at = _unique(right)
        knobs = _alike(self._coordinates.fine(families), self._coordinates.fine(other_families))[np.ix_(at, other_at)]
        same_family = np.array([[one == other for other in other_families] for one in families])[np.ix_(at, other_at)]
        fine = (1 + _ARM_SHARE * same_arm) * knobs + _LINEAGE_SHARE * same_family
        both = self._sizes(arms, sizes), self._sizes(other_arms, other_sizes)
        return _Relations(fixed, errors, usual, fine, same_arm, *both)

    def _same_arm(self, arms: npt.NDArray[np.int64], other_arms: npt.NDArray[np.int64]) -> Array:
        # 1 for points of one arm, and less for arms that differ in switches of the program alone.
        same = np.equal.outer(arms, other_arms).astype(float)
        of_deepspeed = self._coordinates.of_deepspeed
        alike = np.equal.outer(of_deepspeed(arms), of_deepspeed(other_arms)).astype(float)
        shared: Array = same + _SWITCHED_SHARE * (alike - same)
        return shared

    # -- the fitted numbers --------------------------------------------------------------------------------------

    def _fit(self, points: Sequence[Point], costs: Array) -> list[tuple[_Scales, float]]:
        orders = self._orders
        fitted = product(_HALF_SIZES, _FINE, _NOISES, orders)
        settings = [_Scales(half_size, fine, noise, *weight) for half_size, fine, noise, weight in fitted]
        scores = np.array(
            [log(self._orders[scales.weight, scales.errors, scales.trust]) + _prior(scales) for scales in settings]
        )
        if points:
            scores += self._log_likelihoods(points, costs, settings)
        found = dict[int, float]()
        for first in range(len(orders)):
            ours = np.arange(first, len(settings), len(orders))
            likely = ours[np.argsort(-scores[ours], kind="stable")[:_AVERAGED]]
            top = scores[likely[0]]
            shares = np.exp(scores[likely] - top)
            together = np.exp(scores[ours] - top).sum() * np.exp(top - scores.max())
            found |= zip(likely.tolist(), (together * shares / shares.sum()).tolist(), strict=True)
        whole = sum(found.values())
        return [(settings[place], share / whole) for place, share in found.items() if share > _NEGLIGIBLE * whole]

    def _log_likelihoods(self, points: Sequence[Point], costs: Array, settings: Sequence[_Scales]) -> Array:
        relations, unit = self._relations(points, points), np.eye(len(points))
        factors = np.linalg.cholesky(
            np.stack([relations.covariance(scales) + scales.noise**2 * unit for scales in settings])
        )
        differing = {(scales.half_size, scales.trust): scales for scales in settings}
        found = {key: costs - self._prior_mean(points, scales) for key, scales in differing.items()}
        residuals = np.stack([found[scales.half_size, scales.trust] for scales in settings])
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
    # The overhead's share in the cost. Planned costs contain theirs.
    own, planned = np.log1p(half_size / sizes)
    share: Array = own - planned
    return share


def _columns(points: Sequence[Point]) -> tuple[npt.NDArray[np.int64], Array]:
    return (
        np.array([point.arm for point in points], dtype=int),
        np.array([point.size for point in points], dtype=float),
    )


def _unique(points: Sequence[Point]) -> tuple[list[tuple[int, int]], list[int]]:
    places: dict[tuple[int, int], int] = {}
    at = [places.setdefault((point.arm, point.index), len(places)) for point in points]
    return list(places), at


def _alike(left: Array, right: Array) -> Array:
    # The likeness of each row of one with each row of the other: 1 for each equal coordinate.
    distance = np.abs(left[:, None, :] - right[None, :, :])
    alike: Array = np.where(np.isnan(distance), 0.0, np.exp(-_STEP * np.nan_to_num(distance))).sum(axis=2)
    return alike


def _knowledge_gradient(means: Array, covariance: Array, points: int, noise: float) -> Array:
    """The expected fall of the lowest expected cost if a point is measured, for each point. Means and covariance are of
    the points, and then of the rivals, which are measured already.
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
