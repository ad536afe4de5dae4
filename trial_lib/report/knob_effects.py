"""The effects of knobs and their uncertainty, by an additive Gaussian process over all trials of a study.

The logarithm of the metric is a sum of a level, one part for each knob, one smooth part for the micro-batch size, and
noise. A knob's values are exchangeable before anything is measured. Scales and noise are averaged over a grid, weighted
by how well they explain the measurements (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006,
chapters 2 and 5). With few trials the parts stay near zero and their intervals wide, because the data say no more.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from trial_lib.records.result import SEARCH_METRICS
from trial_lib.records.switches import place_of
from trial_lib.report.study_view import StudyView, TrialView
from trial_lib.search.cost_model import Array

MICRO_BATCH = "micro-batch"
FEWEST_TRIALS = 5
# The number of latest trials. More take long and do not change the result.
_MOST_TRIALS = 200
# Standard deviations in logarithms: of the level, of a knob's part, of the micro-batch's, of a measurement.
_LEVEL = 3.0
_KNOB_SCALES, _SIZE_SCALES, _NOISES = (0.08, 0.25), (0.1, 0.3, 1.0), (0.01, 0.03, 0.08, 0.2, 0.4)
_OCTAVES = 1.5
_NORMAL_90 = 1.645


def percent(ratio: float) -> float:
    """A ratio as percent above 1."""
    return 100 * (ratio - 1)


@dataclass(frozen=True)
class KnobEffect:
    knob: str  # its name. If the study always varied several together, their names, joined by commas.
    best: str  # the tried value with the best expectation
    worst: str  # the tried value with the worst expectation
    gain: float  # the expected ratio of the best to the worst
    low: float  # the lower end of its 90 % interval. Below 1, the two may be equal.
    high: float  # its upper end
    values: int  # how many values were tried

    @property
    def is_clear(self) -> bool:
        """Whether the best value is better than the worst beyond the noise."""
        return self.low > 1.0


def knob_effects(view: StudyView) -> list[KnobEffect]:
    """The largest effect first; nothing for too few trials."""
    trials = measured_trials(view)
    columns = _columns(trials)
    if len(trials) < FEWEST_TRIALS or not columns:
        return []
    sign = -1.0 if SEARCH_METRICS[view.metric].smaller_is_better else 1.0
    readings = np.array([sign * log(trial.row.value or 1.0) for trial in trials])
    likenesses = {name: _likeness(name, column, column) for name, column in columns.items()}
    # On a busy machine the threads of small matrices wait for each other for seconds.
    with threadpool_limits(1, "blas"):
        settings = _settings(readings, likenesses)
        effects = [_effect(name, column, readings, likenesses, settings) for name, column in columns.items()]
    return sorted(effects, key=lambda effect: (-effect.low, -effect.gain))


def measured_trials(view: StudyView) -> list[TrialView]:
    """The trials that effects are computed from: the latest that measured the study's metric."""
    measured = (trial for trial in view.trials if not trial.is_profile and (trial.row.value or 0) > 0)
    return list(measured)[-_MOST_TRIALS:]


def _columns(trials: Sequence[TrialView]) -> dict[str, list[Any]]:
    # The values of each knob that has several, by trial; None if a trial does not have the knob.
    paths = dict.fromkeys(path for trial in trials for path in trial.settings)
    columns: dict[str, list[Any]] = {MICRO_BATCH: [trial.row.micro_batch_size for trial in trials]}
    columns |= {path: [_plain(trial.settings.get(path)) for trial in trials] for path in paths}
    together: dict[tuple[int, ...], list[str]] = {}
    for name, column in columns.items():
        if len(_distinct(column)) > 1:
            together.setdefault(tuple(_numbered(column)), []).append(name)
    return {
        ", ".join(place_of(name).removeprefix("zero_optimization.") for name in names): columns[names[0]]
        for names in together.values()
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value, sort_keys=True)


def _distinct(column: Sequence[Any]) -> list[Any]:
    return list({repr(value): value for value in column if value is not None}.values())


def _numbered(column: Sequence[Any]) -> list[int]:
    distinct = [repr(value) for value in _distinct(column)]
    return [-1 if value is None else distinct.index(repr(value)) for value in column]


def _likeness(name: str, left: Sequence[Any], right: Sequence[Any]) -> Array:
    if name.startswith(MICRO_BATCH):
        octaves, others = np.log2(np.array(left, dtype=float)), np.log2(np.array(right, dtype=float))
        near: Array = np.exp(-0.5 * (np.subtract.outer(octaves, others) / _OCTAVES) ** 2)
        return near
    codes = {repr(value): code for code, value in enumerate(_distinct([*left, *right]))}
    # A missing value is like nothing, not even like another missing one.
    ours, theirs = (np.array([codes.get(repr(value), np.nan) for value in values]) for values in (left, right))
    same: Array = np.equal.outer(ours, theirs).astype(np.float64)
    return same


@dataclass(frozen=True)
class _Setting:
    """One setting of scales and noise, its share of the probability, and the matrices that follow from it."""

    weight: float
    scales: Mapping[str, float]
    inverse: Array


def _settings(readings: Array, likenesses: Mapping[str, Array]) -> list[_Setting]:
    residual = readings - readings.mean()
    found = []
    for knob, size, noise in product(_KNOB_SCALES, _SIZE_SCALES, _NOISES):
        scales = {name: size if name.startswith(MICRO_BATCH) else knob for name in likenesses}
        covariance = _LEVEL**2 + noise**2 * np.eye(len(readings))
        for name, likeness in likenesses.items():
            covariance = covariance + scales[name] ** 2 * likeness
        inverse: Array = np.linalg.inv(covariance).astype(np.float64)
        evidence = -0.5 * residual @ inverse @ residual - 0.5 * np.linalg.slogdet(covariance)[1]
        found.append((float(evidence), scales, inverse))
    most = max(evidence for evidence, _, _ in found)
    shares = [(exp(evidence - most), scales, inverse) for evidence, scales, inverse in found]
    kept = [each for each in shares if each[0] > 0.01]
    total = sum(share for share, _, _ in kept)
    return [_Setting(share / total, scales, inverse) for share, scales, inverse in kept]


def _effect(
    name: str,
    column: Sequence[Any],
    readings: Array,
    likenesses: Mapping[str, Array],
    settings: Sequence[_Setting],
) -> KnobEffect:
    values = _distinct(column)
    across, among = _likeness(name, values, column), _likeness(name, values, values)
    residual = readings - readings.mean()
    means = [setting.scales[name] ** 2 * across @ setting.inverse @ residual for setting in settings]
    expected = sum(setting.weight * mean for setting, mean in zip(settings, means, strict=True))
    best, worst = int(np.argmax(expected)), int(np.argmin(expected))
    mean = square = 0.0
    for setting, part in zip(settings, means, strict=True):
        scale = setting.scales[name] ** 2
        covariance = scale * among - scale * across @ setting.inverse @ (scale * across).T
        variance = covariance[best, best] + covariance[worst, worst] - 2 * covariance[best, worst]
        difference = float(part[best] - part[worst])
        mean += setting.weight * difference
        square += setting.weight * (max(0.0, float(variance)) + difference**2)
    reach = _NORMAL_90 * max(0.0, square - mean**2) ** 0.5
    shown = [_text(value) for value in values]
    return KnobEffect(name, shown[best], shown[worst], exp(mean), exp(mean - reach), exp(mean + reach), len(values))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
