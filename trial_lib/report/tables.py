"""The tables of a study: their rows for every page, and what a terminal shows, drawn by rich."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from threadpoolctl import threadpool_limits

from zerotune.trial_lib.plan.plan_record import PlannedTrials
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.records.switches import place_of
from zerotune.trial_lib.records.units import bytes_shown, duration, quantity
from zerotune.trial_lib.report.study_view import (
    Interval,
    StudyView,
    TrialView,
    failure_groups,
    setting_text,
    trial_columns,
)
from zerotune.trial_lib.search.peak_regression import PeakRegression, Prior

# A plan beside the trials that it foresaw.

_NONE = "-"
PLANNED_COLUMNS = (
    *("trial", "arm", "batch"),
    *("memory foreseen", "measured", "off"),
    *("samples/s foreseen", "measured", "off"),
)
PLANNED_NUMBERS = PLANNED_COLUMNS[2:]


def planned_rows(planned: PlannedTrials) -> list[tuple[str, ...]]:
    """The cells of `PLANNED_COLUMNS` for each trial."""
    rows: list[tuple[str, ...]] = []
    for trial in planned.trials:
        speed = _NONE
        if trial.samples_per_s is not None and trial.low is not None and trial.high is not None:
            speed = f"{_rate(trial.samples_per_s)} ({_rate(trial.low)} to {_rate(trial.high)})"
        measured = _NONE if trial.measured_memory is None else bytes_shown(trial.measured_memory)
        memory = bytes_shown(trial.memory), measured, _off(trial.memory_off)
        rate = speed, _rate(trial.measured_samples_per_s), _off(trial.speed_off)
        rows.append((f"{trial.number:04d}", trial.label, str(trial.micro_batch), *memory, *rate))
    return rows


def _rate(value: float | None) -> str:
    return _NONE if value is None else quantity(value, "").rstrip()


def _off(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:+.0f} %"


# The effects of knobs and their uncertainty, from all trials of a study.
#
# The logarithm of the metric is a sum of a level, one part for each knob, one smooth part for the micro-batch size, and
# noise. A knob's values are exchangeable before anything is measured. Scales and noise are averaged over a grid,
# weighted by how well they explain the measurements. With few trials the parts stay near zero and their intervals wide,
# because the data say no more.

MICRO_BATCH = "micro-batch"
FEWEST_TRIALS = 5
# The number of latest trials. More take long and do not change the result.
_MOST_TRIALS = 200
# Standard deviations in logarithms: of the level, of a knob's part, of the micro-batch's, of a measurement.
_LEVEL = 3.0
_KNOB_SCALES, _SIZE_SCALES, _NOISES = (0.08, 0.25), (0.1, 0.3, 1.0), (0.01, 0.03, 0.08, 0.2, 0.4)
_OCTAVES = 1.5  # over which the parts of two sizes are alike
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
    parts = _parts(columns)
    deviations = [
        [_LEVEL, *((size if part.is_of_sizes else knob) for part in parts for _ in part.values)]
        for knob, size in product(_KNOB_SCALES, _SIZE_SCALES)
    ]
    # On a busy machine the threads of small matrices wait for each other for seconds.
    with threadpool_limits(1, "blas"):
        priors = [Prior(1.0, (0.0,) * len(each), tuple(each)) for each in deviations]
        regression = PeakRegression(priors, noise_levels=_NOISES)
        for place, reading in enumerate((readings - readings.mean()).tolist()):
            row = np.sum([part.row(columns[part.name][place]) for part in parts], axis=0)
            row[0] = 1.0
            regression.observe([row.tolist()], None, 1.0, reading)
        effects = [_effect(part, regression) for part in parts]
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
        distinct = list(_distinct(column))
        if len(distinct) > 1:
            numbers = tuple(-1 if value is None else distinct.index(repr(value)) for value in column)
            together.setdefault(numbers, []).append(name)
    return {
        ", ".join(place_of(name).removeprefix("zero_optimization.") for name in names): columns[names[0]]
        for names in together.values()
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value, sort_keys=True)


def _distinct(column: Sequence[Any]) -> dict[str, Any]:
    # By its text, because 1 and True are equal.
    return {repr(value): value for value in column if value is not None}


@dataclass(frozen=True)
class _Part:
    """The part of one knob in the logarithm of the metric."""

    name: str
    values: Mapping[str, Any]  # the tried ones, by their text
    rows: npt.NDArray[np.float64]  # for each of them, its share in each weight. The first weight is the level.

    @property
    def is_of_sizes(self) -> bool:
        return self.name.startswith(MICRO_BATCH)

    def row(self, value: Any) -> npt.NDArray[np.float64]:
        """A trial without the knob has no part of it."""
        return np.zeros(self.rows.shape[1]) if value is None else self.rows[list(self.values).index(repr(value))]


def _parts(columns: Mapping[str, Sequence[Any]]) -> list[_Part]:
    values = {name: _distinct(column) for name, column in columns.items()}
    weights = 1 + sum(map(len, values.values()))
    parts: list[_Part] = []
    start = 1
    for name, tried in values.items():
        shares = np.eye(len(tried))
        if name.startswith(MICRO_BATCH):
            octaves = np.log2(np.array(list(tried.values()), dtype=float))
            near = np.exp(-0.5 * (np.subtract.outer(octaves, octaves) / _OCTAVES) ** 2)
            # Independent weights times its root are alike as sizes are. Equal sizes but for rounding have no root.
            shares = np.linalg.cholesky(near + 1e-9 * shares)
        rows = np.zeros((len(tried), weights))
        rows[:, start : start + len(tried)] = shares
        parts.append(_Part(name, tried, rows))
        start += len(tried)
    return parts


def _effect(part: _Part, regression: PeakRegression) -> KnobEffect:
    expected = [regression.predict([row.tolist()], None, scale=0.0).mean for row in part.rows]
    best, worst = int(np.argmax(expected)), int(np.argmin(expected))
    difference = regression.predict([(part.rows[best] - part.rows[worst]).tolist()], None, scale=0.0)
    mean, reach = difference.mean, _NORMAL_90 * difference.deviation
    shown = [_text(value) for value in part.values.values()]
    return KnobEffect(part.name, shown[best], shown[worst], exp(mean), exp(mean - reach), exp(mean + reach), len(shown))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


# The terminal.

_STATUS_STYLES = {"completed": "green", "failed": "red", "running": "cyan"}
_KNOBS_SHOWN = 8
_TRIALS_SHOWN = 40


def print_study(view: StudyView, console: Console) -> None:
    # Nobody can copy a command that is broken into lines.
    console.print(_answer(view), soft_wrap=True, highlight=False)
    for table in _tables(view):
        console.print(table, highlight=False)


def _tables(view: StudyView) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for draw, content in ((_changes, view.changes), (_confirmed, view.confirmed), (_trials, view.trials)):
        parts += ["", draw(view)] if content else []
    if view.planned is not None and view.planned.trials:
        parts += ["", _planned(view.planned)]
    labels = {number: f"{number:04d} {label}" for number, label in view.running.items()}
    if running := [label for number, label in labels.items() if number not in view.waiting]:
        parts.append(Text("running: " + ", ".join(running)))
    parts += [Text(f"waiting for slots: {labels[number]}: {wait}") for number, wait in view.waiting.items()]
    if view.failed:
        parts += ["", _failures(view)]
    effects = _knobs(view)
    if effects is not None:
        parts += ["", effects]
    return parts


def _answer(view: StudyView) -> Text:
    text = Text()
    text.append(f"{view.headline}\n", style="bold")
    text.append(view.status, style=_STATUS_STYLES.get(view.status, "yellow"))
    text.append(f"  {view.study_id}: {view.method}, {view.searched} of at most {view.max_trials} trials")
    text.append(f", {duration(view.seconds)}")
    if view.regression:
        text.append(f"\n{view.regression}", style="red")
    if view.reason:
        text.append(f"\n{view.reason}")
    for note in view.notes:
        text.append(f"\n{note}", style="dim")
    for account in view.why:
        text.append(f"\n{account.sentences}", style=None if account.role in ("winner", "own") else "dim")
    if view.planned is not None:
        text.append(f"\n{view.planned.sentence}", style="dim")
    if view.best_command:
        text.append(f"\n{view.best_command}", style="cyan")
    if view.diff:
        text.append(f"\n{view.diff}")
        text.append("\nzerotune apply writes this into your files.", style="dim")
    text.append(f"\n{view.folder}", style="dim")
    return text


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def _changes(view: StudyView) -> Table:
    table = _table("what it changes in your configuration", "setting", "yours", "winner")
    for change in view.changes:
        values = (setting_text(value) for value in (change.own, change.winner))
        table.add_row(escape(place_of(change.setting)), *map(escape, values))
    return table


def _confirmed(view: StudyView) -> Table:
    numbers = ("samples/s", "over yours", "trials")
    table = _table("measured again in fresh processes", "configuration", *numbers, "verdict", right=numbers)
    for again in view.confirmed:
        table.add_row(
            escape(again.name),
            _interval(again.throughput, ".1f", ""),
            _interval(again.gain, ".2f", "x"),
            str(len(again.trials)),
            "yours" if again.verdict == "own" else again.verdict,
            style="green" if again.is_winner else None,
        )
    return table


def _trials(view: StudyView) -> Table:
    ranked = view.ranked[:_TRIALS_SHOWN]
    columns = trial_columns("show", view.metric, [trial.row for trial in ranked])
    numbers = tuple(column.name for column in columns if column.kind == "number")
    table = _table("trials", *(column.name for column in columns), right=numbers)
    # What tells rows apart is never cut.
    table.columns[[column.kind for column in columns].index("name")].overflow = "fold"
    for trial in ranked:
        style = "green" if trial.number == view.best_number else None if trial.completed else "dim"
        table.add_row(*(escape(column.cell(trial.row)) for column in columns), style=style)
    if len(view.trials) > _TRIALS_SHOWN:
        more = "--json" if view.status == "running" else "--json, or report.html"
        table.caption = f"and {len(view.trials) - _TRIALS_SHOWN} more: {more}"
    return table


def _planned(planned: PlannedTrials) -> Table:
    table = _table(f"the plan for {planned.devices} and its trials", *PLANNED_COLUMNS, right=PLANNED_NUMBERS)
    for row in planned_rows(planned):
        table.add_row(*map(escape, row))
    return table


def _failures(view: StudyView) -> Table:
    table = _table("did not complete", "trials", "outcome", "micro-batch", "reason", right=("trials",))
    for group in failure_groups(view.trials):
        table.add_row(str(len(group.trials)), group.outcome.value, group.micro_batches, escape(group.reason))
    return table


def _knobs(view: StudyView) -> Table | None:
    effects = knob_effects(view)[:_KNOBS_SHOWN]
    if not effects:
        return None
    numbers = ("best over worst", "90 % interval")
    table = _table("which knobs mattered", "knob", "best", "worst", *numbers, right=numbers)
    for effect in effects:
        table.add_row(
            escape(effect.knob),
            effect.best,
            effect.worst,
            f"{percent(effect.gain):+.1f} %",
            f"{percent(effect.low):+.1f} to {percent(effect.high):+.1f} %",
            style=None if effect.is_clear else "dim",
        )
    return table


def _interval(interval: Interval | None, style: str, unit: str) -> str:
    if interval is None:
        return ""
    value, low, high = (format(each, style) for each in (interval.value, interval.low, interval.high))
    return f"{value}{unit} ({low} to {high})" if interval.has_ends else f"{value}{unit}"
