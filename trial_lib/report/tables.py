"""The tables of a study: their rows for every page, and what a terminal shows, drawn by rich."""

import time
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zerotune.trial_lib.plan.plan_record import PlannedTrials
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.records.units import bytes_shown, duration, gain_shown, quantity
from zerotune.trial_lib.report.knob_effects import knob_effects
from zerotune.trial_lib.report.study_view import (
    WORTH_COLUMNS,
    Interval,
    StudyView,
    failure_groups,
    setting_text,
    trial_columns,
    worth_rows,
)
from zerotune.trial_lib.study.finding import OF_WORTHS

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


# A study in a form that can be laid beside another's: by `zerotune compare`, and by a report's page.

NOT_IN_TURN = "They were not measured in turn, so how much of that is the machine's and the hour's is not known."


def summary(view: StudyView) -> dict[str, Any]:
    """The answer, which is always shown, and the circumstances and settings, shown where two studies differ."""
    metric, interval = SEARCH_METRICS[view.metric], view.gain_interval
    ends = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    answer = {
        "experiment": view.name,
        "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(view.started_at)),
        "status": view.status,
        "gain": f"{gain_shown(view.gain, interval)}{ends}",
        f"{metric.name}, yours": metric.shown(view.before.get(view.metric)),
        f"{metric.name}, winner": metric.shown(view.after.get(view.metric)),
        "trials": str(view.searched),
    }
    facts = {name: value for name, value in view.facts.items() if name not in ("started", "folder")}
    settings = {change.name: setting_text(change.winner) for change in view.changes}
    return {
        "study": view.study_id,
        "answer": {name: text or "-" for name, text in answer.items()},
        "circumstances": {**facts, **settings},
    }


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
    contents = ((_changes, view.changes), (_confirmed, view.confirmed), (_worths, view.worths), (_trials, view.trials))
    for draw, content in contents:
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
        table.add_row(escape(change.name), *map(escape, values))
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


def _worths(view: StudyView) -> Table:
    table = _table("what each change is worth", *WORTH_COLUMNS, right=WORTH_COLUMNS[1:3])
    table.caption, table.caption_justify = OF_WORTHS, "left"
    for row, worth in zip(worth_rows(view), view.worths, strict=True):
        table.add_row(*map(escape, row), style=None if worth.verdict == "kept" else "dim")
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
    numbers = ("times", "90 % interval")
    table = _table("which knobs mattered", "knob", "better", "than", *numbers, "seen by", right=numbers)
    for effect in effects:
        cells = (effect.knob, effect.best, effect.worst, effect.times, effect.interval, effect.source)
        table.add_row(*map(escape, cells), style=None if effect.is_clear else "dim")
    return table


def _interval(interval: Interval | None, style: str, unit: str) -> str:
    if interval is None:
        return ""
    value, low, high = (format(each, style) for each in (interval.value, interval.low, interval.high))
    return f"{value}{unit} ({low} to {high})" if interval.has_ends else f"{value}{unit}"
