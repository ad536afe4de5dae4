"""Which knobs mattered in a study, and how much: by trials that differ in one knob alone, else by the search's model.

Two configurations are compared directly if they differ in one knob and in nothing else. A coarse knob takes along the
fine ones that only one of the two arms has. A fine knob that a configuration leaves open counts as DeepSpeed's default,
or as the best guess of its arm, as the search counts it. What no two trials show is the expectation of `CostModel`, all
else as in the best trial. The noise of a reading is the model's, corrected by configurations that were read repeatedly.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log, sqrt
from statistics import fmean
from typing import Any

from threadpoolctl import threadpool_limits

from zerotune.trial_lib.messages.statistics import t_quantile
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.records.switches import place_of
from zerotune.trial_lib.report.study_view import StudyView, TrialView
from zerotune.trial_lib.search.catalogue import KNOBS, catalogues_name, is_coarse
from zerotune.trial_lib.search.cost_model import CostModel, Point, SpaceCoordinates, prior_costs
from zerotune.trial_lib.search.knobs import LEFT_OPEN, STAGE, ZERO_STAGES, Arm, Knob, SearchSpace, set_knob

MICRO_BATCH = "micro-batch"
FEWEST_TRIALS = 5
# The number of latest trials. More take long and do not change the result.
_MOST_TRIALS = 200
_ERROR = 0.1  # of an interval
_OFF = "off"
# The noise that the model has fitted counts as much as so many differences between repeats of a configuration.
_PRIOR_REPEATS = 3

_Settings = Mapping[str, Any]  # of one configuration by path, with its micro-batch size. A fine one may be missing.


@dataclass(frozen=True)
class KnobEffect:
    knob: str  # its name. If the study always varied several together, their names, joined by commas.
    best: str  # the better of two tried values
    worst: str  # the other
    gain: float  # the ratio of the better to the other
    low: float  # the lower end of its 90 % interval. Below 1, the two may be equal.
    high: float  # its upper end
    values: int  # how many values were tried
    # How many trials with either value were compared that differ in this knob alone. None if the search's model has
    # compared.
    trials: tuple[int, int] | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the better value is better than the other beyond the noise."""
        return self.low > 1.0

    @property
    def times(self) -> str:
        return f"{self.gain:.2f}x"

    @property
    def interval(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"

    @property
    def source(self) -> str:
        return "the model" if self.trials is None else f"{self.trials[0]} + {self.trials[1]} trials"


def knob_effects(view: StudyView) -> list[KnobEffect]:
    """The largest effect first; nothing for too few trials."""
    trials = measured_trials(view)
    settings = _settings(trials, view.num_params)
    knobs = _knobs(settings)
    if len(trials) < FEWEST_TRIALS or not knobs:
        return []
    metric = SEARCH_METRICS[view.metric]
    sign = 1.0 if metric.smaller_is_better else -1.0
    logs = [sign * log(trial.row.value or 1.0) for trial in trials]
    costs = [each - fmean(logs) for each in logs]
    answer = next((place for place, trial in enumerate(trials) if trial.number == view.best_number), None)
    best = min(range(len(costs)), key=costs.__getitem__) if answer is None else answer
    # On a busy machine the threads of small matrices wait for each other for seconds.
    with threadpool_limits(1, "blas"):
        model = _Model(settings, costs, metric.smaller_is_better and not view.keeps_batch)
        repeated = _Repeated(settings, costs, model.noise)
        effects = [
            repeated.effect(name, paths) or model.effect(name, paths, settings[best]) for name, paths in knobs.items()
        ]
    found = [effect for effect in effects if effect is not None]
    return sorted(found, key=lambda effect: (-effect.low, -effect.gain))


def measured_trials(view: StudyView) -> list[TrialView]:
    """The trials that effects are computed from: the latest that measured the study's metric."""
    measured = (trial for trial in view.trials if not trial.is_profile and (trial.row.value or 0) > 0)
    return list(measured)[-_MOST_TRIALS:]


# What the trials had.


def _settings(trials: Sequence[TrialView], num_params: int) -> list[_Settings]:
    coarse = [path for path in dict.fromkeys(path for trial in trials for path in trial.settings) if is_coarse(path)]
    found: list[dict[str, Any]] = []
    guesses: dict[str, dict[str, Any]] = {}  # by arm
    for trial in trials:
        stage = trial.settings.get(STAGE)  # None if the study had one stage
        given = {
            path: _plain(_capped(path, value, num_params))
            for path, value in trial.settings.items()
            if _is_read(path, stage)
        }
        found.append({MICRO_BATCH: trial.row.micro_batch_size, **dict.fromkeys(coarse, _OFF), **given})
        guess = guesses.setdefault(_arm(found[-1]), {})
        for path, value in given.items():
            guess.setdefault(path, value)
    return [{**{path: LEFT_OPEN.get(path, v) for path, v in guesses[_arm(each)].items()}, **each} for each in found]


def _is_read(path: str, stage: Any) -> bool:
    # A setting of stage 3 may stand in the configuration of another stage, which does not read it.
    known = KNOBS.get(catalogues_name(path))
    if known is None or known.is_coarse or stage is None:
        return True
    return any(stage in effect.stages for effect in known.effects)


def _capped(path: str, value: Any, num_params: int) -> Any:
    # Of elements beyond the model's size, as the space of a search has them.
    known = KNOBS.get(catalogues_name(path))
    is_number = isinstance(value, (int, float)) and 2 <= value < 2**63
    if known is None or known.kind != "count" or not is_number:
        return value
    return min(int(value), num_params or int(value))


def _arm(settings: _Settings) -> str:
    return repr(sorted((path, repr(value)) for path, value in settings.items() if is_coarse(path)))


def _knobs(settings: Sequence[_Settings]) -> dict[str, list[str]]:
    # The paths that vary, by name. Those that always vary together are one knob.
    together: dict[tuple[int, ...], list[str]] = {}
    for path in dict.fromkeys(path for each in settings for path in each):
        texts = [repr(each[path]) if path in each else None for each in settings]
        distinct = list(dict.fromkeys(text for text in texts if text is not None))
        if len(distinct) > 1:
            numbers = tuple(-1 if text is None else distinct.index(text) for text in texts)
            together.setdefault(numbers, []).append(path)
    names = [[place_of(path).removeprefix("zero_optimization.") for path in each] for each in together.values()]
    return dict(zip(map(", ".join, names), together.values(), strict=True))


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value, sort_keys=True)


def _text(values: Sequence[Any]) -> str:
    value = values[0]
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


# What trials show directly.


class _Repeated:
    """The configurations of some trials with all their readings, and the pairs of them that differ in one knob."""

    def __init__(self, settings: Sequence[_Settings], costs: Sequence[float], noise: float) -> None:
        readings: dict[str, list[float]] = {}
        configs: dict[str, _Settings] = {}
        for each, cost in zip(settings, costs, strict=True):
            key = repr(sorted((path, repr(value)) for path, value in each.items()))
            configs[key] = each
            readings.setdefault(key, []).append(cost)
        squares = sum((cost - fmean(of_one)) ** 2 for of_one in readings.values() for cost in of_one)
        repeats = len(costs) - len(readings)
        self._freedom = _PRIOR_REPEATS + repeats
        self._variance = (_PRIOR_REPEATS * noise**2 + squares) / self._freedom
        self._pairs = [
            (differing, configs[one], configs[other], readings[one], readings[other])
            for one, other in combinations(configs, 2)
            if (differing := _differing(configs[one], configs[other]))
        ]
        self._configs = list(configs.values())

    def effect(self, name: str, paths: Sequence[str]) -> KnobEffect | None:
        """The two values of a knob that differ most surely; None if no two trials differ in it alone."""
        compared: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
        texts: dict[str, str] = {}
        for differing, one, other, ours, theirs in self._pairs:
            if not differing <= set(paths):
                continue
            first, second = ([each.get(path) for path in paths] for each in (one, other))
            texts |= {repr(first): _text(first), repr(second): _text(second)}
            pair = repr(first), repr(second)
            if pair[::-1] in compared:
                pair, ours, theirs = pair[::-1], theirs, ours
            compared.setdefault(pair, []).append((fmean(ours) - fmean(theirs), len(ours), len(theirs)))
        if not compared:
            return None
        quantile = t_quantile(1.0 - _ERROR / 2.0 / len(compared), self._freedom)
        found = []
        for (first_value, second_value), contexts in compared.items():
            weights = [1.0 / (1 / ours + 1 / theirs) for _, ours, theirs in contexts]
            mean = sum(w * d for w, (d, _, _) in zip(weights, contexts, strict=True)) / sum(weights)
            between = sum(w * (d - mean) ** 2 for w, (d, _, _) in zip(weights, contexts, strict=True))
            # The value may matter more beside some knobs than beside others.
            variance = max(self._variance, between / max(1, len(contexts) - 1)) / sum(weights)
            counts = sum(ours for _, ours, _ in contexts), sum(theirs for _, _, theirs in contexts)
            best, worst, trials = first_value, second_value, counts
            if mean > 0:
                best, worst, trials = second_value, first_value, counts[::-1]
            found.append((abs(mean) - quantile * sqrt(variance), abs(mean), best, worst, trials))
        low, gain, best, worst, trials = max(found)
        values = len({repr([each.get(path) for path in paths]) for each in self._configs if paths[0] in each})
        return KnobEffect(name, texts[best], texts[worst], exp(gain), exp(low), exp(2 * gain - low), values, trials)


def _differing(one: _Settings, other: _Settings) -> set[str]:
    # The paths of the knobs in which two configurations differ; nothing if only one of them has some of these.
    both = {path for path in one.keys() & other.keys() if repr(one[path]) != repr(other[path])}
    alone = one.keys() ^ other.keys()
    return both if not alone or any(map(is_coarse, both)) else set()


# What the search's model expects.


class _Model:
    """The search's model of the cost, over the arms that some trials had and those that they might have had."""

    def __init__(self, settings: Sequence[_Settings], costs: Sequence[float], grows: bool) -> None:
        self._settings, self._costs, self._grows = settings, costs, grows
        self._values = {
            path: list({repr(each[path]): each[path] for each in settings if path in each}.values())
            for path in dict.fromkeys(path for each in settings for path in each)
        }
        # Of the noise, which is fitted beside a level and the knobs
        varied = sum(len(values) > 1 for values in self._values.values())
        self._freedom = max(1, len(costs) - 1 - varied)
        _, model = self._fit(())
        self.noise = model.noise

    def _fit(self, also: Iterable[_Settings]) -> tuple[dict[str, tuple[int, Arm]], CostModel]:
        arms: dict[str, Arm] = {}
        for each in (*self._settings, *also):
            if _arm(each) not in arms:
                arms[_arm(each)] = self._made(each)
        space = SearchSpace(tuple(arms.values()))
        numbered = {name: (number, arm) for number, (name, arm) in enumerate(arms.items())}
        points = [_point(each, numbered) for each in self._settings]
        coordinates, prior = SpaceCoordinates(space, "cpu"), prior_costs(space.arms)
        return numbered, CostModel(coordinates, prior, self._grows, points, self._costs)

    def _made(self, settings: _Settings) -> Arm:
        # A configuration that DeepSpeed refuses may have anything as its stage.
        knobs: dict[str, Any] = {"zero_optimization": {"stage": 0}}
        fine = []
        for path, value in settings.items():
            if is_coarse(path) and value != _OFF and (path != STAGE or value in ZERO_STAGES):
                set_knob(knobs, path, value)
            elif not is_coarse(path) and path != MICRO_BATCH:
                others = (each for each in self._values[path] if repr(each) != repr(value))
                fine.append(Knob(path, (value, *others)))
        return Arm(knobs, tuple(fine))

    def effect(self, name: str, paths: Sequence[str], beside: _Settings) -> KnobEffect | None:
        """The values of a knob with the best and the worst expectation, beside the settings of a trial."""
        tried: dict[str, list[Any]] = {}
        for each in self._settings:
            if paths[0] in each:
                tried.setdefault(repr([each.get(path) for path in paths]), [each.get(path) for path in paths])
        options = [{**beside, **dict(zip(paths, values, strict=True))} for values in tried.values()]
        numbered, model = self._fit(options)
        points = [_point(each, numbered) for each in options]
        expected = model.expected(points).tolist()
        best, worst = (expected.index(each) for each in (min(expected), max(expected)))
        mean, deviation = model.difference(points[worst], points[best])
        reach = t_quantile(1.0 - _ERROR / 2.0, self._freedom) * deviation
        texts = [_text(values) for values in tried.values()]
        return KnobEffect(name, texts[best], texts[worst], exp(mean), exp(mean - reach), exp(mean + reach), len(texts))


def _point(settings: _Settings, arms: Mapping[str, tuple[int, Arm]]) -> Point:
    number, arm = arms[_arm(settings)]
    index, weight = 0, 1
    for knob in arm.fine:
        texts = [repr(value) for value in knob.values]
        index += weight * (texts.index(repr(settings[knob.path])) if knob.path in settings else 0)
        weight *= len(texts)
    return Point(number, index, settings[MICRO_BATCH])
