"""The report of a study: one self-contained HTML file, with plotly's drawing code.

Each figure has its numbers as a table for readers who cannot see or hover.
"""

import base64
import contextlib
import gzip
import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.messages.files import OWNERS_FOLDER, write_whole
from zerotune.trial_lib.messages.measurement import STEP_PARTS
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.records.units import axis_unit, bytes_shown, duration, quantity
from zerotune.trial_lib.report.knob_effects import FEWEST_TRIALS, knob_effects, measured_trials
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.study_view import (
    WORTH_COLUMNS,
    Interval,
    StudyView,
    TrialView,
    failure_groups,
    setting_text,
    trial_columns,
    worth_rows,
)
from zerotune.trial_lib.report.tables import PLANNED_COLUMNS, PLANNED_NUMBERS, planned_rows

# The figures, drawn by plotly.

# Colour-blind readers can distinguish these, on white and on black. Each arm also has its own symbol.
COLOURS = ("#2f81d6", "#d9730d", "#159a74", "#c2529a", "#8567d6", "#a67c00", "#5b8c1d", "#d0454c")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "pentagon", "hexagon")
GREY, RED, GREEN = "#838b98", "#d0454c", "#159a74"


def empty_figure(x: str, y: str) -> go.Figure:
    """The page sets the colours that depend on light or dark."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=420,
        margin={"l": 64, "r": 16, "t": 12, "b": 52},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
        hovermode="closest",
    )
    figure.update_xaxes(title=x, zeroline=False, automargin=True)
    figure.update_yaxes(title=y, zeroline=False, automargin=True)
    return figure


def add_arm(figure: go.Figure, arm: str, of_arm: Sequence[TrialView], place: int) -> None:
    """Draws an arm's trials, and a line through its best one at each micro-batch size; `place` is the arm's index."""
    measured = [(trial, trial.throughput) for trial in of_arm if trial.throughput is not None]
    best: dict[int, float] = {}
    for trial, throughput in measured:
        size = trial.row.micro_batch_size
        best[size] = max(throughput.value, best.get(size, 0.0))

    def beside(sizes: Iterable[int]) -> list[float]:
        # Points of several arms do not overlap.
        return [size * 1.015 ** (place - 1.5) for size in sizes]

    colour = COLOURS[place % len(COLOURS)]
    figure.add_scatter(
        x=beside(best),
        y=list(best.values()),
        mode="lines",
        line={"color": colour, "width": 1.5},
        opacity=0.6,
        showlegend=False,
        hoverinfo="skip",
    )
    figure.add_scatter(
        name=arm,
        x=beside(trial.row.micro_batch_size for trial, _ in measured),
        y=[throughput.value for _, throughput in measured],
        error_y={**error_bars([throughput for _, throughput in measured], 1.0), "thickness": 1, "width": 3},
        mode="markers",
        marker={"color": colour, "symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 9, "opacity": 0.85},
        customdata=[f"{trial.number:04d} {trial.row.label}" for trial, _ in measured],
        hovertemplate="%{customdata}<br>%{y:.1f} samples/s<extra></extra>",
    )


def add_confirmed(figure: go.Figure, name: str, size: int, throughput: Interval, is_winner: bool) -> None:
    colour = GREEN if is_winner else GREY
    figure.add_scatter(
        name=f"confirmed: {name}",
        x=[size],
        y=[throughput.value],
        error_y={**error_bars([throughput], 1.0), "thickness": 3, "width": 9, "color": colour},
        mode="markers",
        marker={"symbol": "star", "size": 13, "color": colour, "line": {"width": 1, "color": "#ffffff"}},
        hovertemplate=f"{plain(name)}<br>%{{y:.1f}} samples/s<extra></extra>",
    )


def add_failed(figure: go.Figure, failed: Sequence[tuple[TrialView, float]], minutes: bool = False) -> None:
    """Draws trials that did not complete, each at a height, over minutes or over their numbers."""
    if failed:
        figure.add_scatter(
            name="did not complete",
            x=[trial.ended / 60 if minutes else f"{trial.number:04d}" for trial, _ in failed],
            y=[value for _, value in failed],
            mode="markers",
            marker={"symbol": "x-thin", "size": 10, "line": {"width": 2, "color": RED}},
            customdata=[
                f"{trial.number:04d} {trial.row.label}<br>{trial.row.outcome.value.replace('_', ' ')}"
                for trial, _ in failed
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )


def error_bars(intervals: Sequence[Interval], unit: float) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [(each.high - each.value) / unit for each in intervals],
        "arrayminus": [(each.value - each.low) / unit for each in intervals],
    }


def ticks(sizes: Sequence[int]) -> list[int]:
    """The labelled sizes of a logarithmic axis: each at least a quarter more than the one before."""
    ticks: list[int] = []
    for size in sizes:
        if not ticks or size >= 1.25 * ticks[-1]:
            ticks.append(size)
    return ticks


def three(interval: Interval | None, unit: float, style: str) -> tuple[str, str, str]:
    if interval is None:
        return "", "", ""
    low, value, high = (format(each / unit, style) for each in (interval.low, interval.value, interval.high))
    return value, low, high


def is_confirming(trial: TrialView) -> bool:
    return trial.row.purpose is Purpose.CONFIRM


def plain(text: str) -> str:
    """Escapes for plotly, which reads HTML as markup and `%{` as a variable."""
    return html.escape(text, quote=False).replace("%{", "% {")


_LARGE = 10 * 2**30  # bytes from which GiB are shown
_KNOBS_SHOWN = 12
_FAR = 4  # times the memory of trials: a larger budget is written, not drawn


@dataclass(frozen=True)
class Drawn:
    key: str  # its name in addresses and files
    title: str  # of the figure
    says: str  # how to read it
    figure: go.Figure | None  # the drawing. None if there is nothing to draw; `says` has the reason.
    columns: tuple[str, ...] = ()  # of the table of its numbers
    rows: tuple[tuple[str, ...], ...] = ()  # of that table


def draw_figures(view: StudyView) -> list[Drawn]:
    return [throughput_figure(view), memory_figure(view), progress_figure(view), knobs_figure(view)]


def throughput_figure(view: StudyView) -> Drawn:
    measured = [trial for trial in view.trials if trial.throughput is not None and not trial.is_profile]
    searched = [trial for trial in measured if not is_confirming(trial)]
    key, title = "throughput", "Throughput against micro-batch size"
    if not searched:
        return Drawn(key, title, "No trial has measured a throughput.", None)
    figure = empty_figure("micro-batch size (samples)", "samples/s")
    for place, arm in enumerate(sorted({trial.arm for trial in searched})):
        of_arm = sorted((trial for trial in searched if trial.arm == arm), key=lambda t: t.row.micro_batch_size)
        add_arm(figure, arm, of_arm, place)
    for again in view.confirmed:
        if again.throughput is not None:
            add_confirmed(figure, again.name, again.micro_batch_size, again.throughput, again.is_winner)
    sizes = sorted({trial.row.micro_batch_size for trial in searched})
    figure.update_xaxes(type="log", tickvals=ticks(sizes), ticktext=[str(size) for size in ticks(sizes)])
    figure.update_yaxes(rangemode="tozero")
    says = (
        "Every completed trial of the search, and a line through the best trials of each arm (ZeRO stage and "
        "offload). Thin bars span the middle half of the trial's own steps."
    )
    confirmed = [again.throughput for again in view.confirmed if again.throughput is not None]
    if confirmed:
        says += " Stars were measured again, in fresh processes"
        known = any(throughput.has_ends for throughput in confirmed)
        says += "; their bars are intervals over those processes." if known else "."
    rows = tuple(
        (f"{trial.number:04d}", trial.arm, str(trial.row.micro_batch_size), *three(trial.throughput, 1.0, ".1f"))
        for trial in measured
    )
    return Drawn(key, title, says, figure, ("trial", "arm", "micro-batch", "samples/s", "low", "high"), rows)


def memory_figure(view: StudyView) -> Drawn:
    trials = [(trial, trial.memory) for trial in view.trials if trial.memory is not None]
    key, title = "memory", "Memory of the steps: predicted, measured, budget"
    if not trials:
        return Drawn(key, title, "Nothing was predicted: the profile trial did not complete.", None)
    most = max(max(memory.predicted.value, memory.measured or 0.0) for _, memory in trials)
    unit, size = ("GiB", 2**30) if most >= _LARGE else ("MiB", 2**20)
    figure = empty_figure("trial", f"{unit} above initialisation")
    x = [f"{trial.number:04d}" for trial, _ in trials]
    predicted = [memory.predicted for _, memory in trials]
    figure.add_scatter(
        name="predicted (90 %)",
        x=x,
        y=[each.value / size for each in predicted],
        error_y=error_bars(predicted, size),
        mode="markers",
        marker={"symbol": "line-ew-open", "color": COLOURS[0], "size": 9, "line": {"width": 2}},
        customdata=[trial.row.label for trial, _ in trials],
        hovertemplate=f"%{{x}} %{{customdata}}<br>predicted %{{y:,.1f}} {unit}<extra></extra>",
    )
    done = [(trial, memory.measured) for trial, memory in trials if memory.measured is not None]
    figure.add_scatter(
        name="measured",
        x=[f"{trial.number:04d}" for trial, _ in done],
        y=[measured / size for _, measured in done],
        mode="markers",
        marker={"symbol": "circle", "color": COLOURS[1], "size": 8},
        customdata=[trial.row.label for trial, _ in done],
        hovertemplate=f"%{{x}} %{{customdata}}<br>measured %{{y:,.1f}} {unit}<extra></extra>",
    )
    add_failed(figure, [(trial, memory.predicted.value / size) for trial, memory in trials if not trial.completed])
    # What is left of a slot.
    limits = [None if memory.budget is None else memory.budget / size for _, memory in trials]
    seen = [measured for _, measured in done]
    # The first predictions follow no trial, so their intervals may be as wide as the rest is high.
    most = max(*(each.value for each in predicted), *(each.high for each in predicted[1:]), *seen, 0.0) / size
    budgets = [limit for limit in limits if limit is not None]
    if budgets and min(budgets) > _FAR * most:
        # It would flatten the rest.
        figure.add_annotation(
            x=1,
            y=1,
            xref="paper",
            yref="paper",
            text=f"budget: {bytes_shown(min(budgets) * size)} ↑",
            showarrow=False,
            xanchor="right",
            yanchor="top",
            font_color=RED,
        )
    elif budgets:
        most = max([most, *budgets])
        figure.add_scatter(
            name="budget",
            x=x,
            y=limits,
            mode="lines",
            line={"color": RED, "width": 2, "dash": "dot", "shape": "hvh"},
            hovertemplate=f"%{{x}}<br>budget %{{y:,.1f}} {unit}<extra></extra>",
        )
    figure.update_xaxes(type="category", nticks=12)
    figure.update_yaxes(range=[0, 1.08 * most])
    inside = sum(
        memory.measured is not None and memory.predicted.low <= memory.measured <= memory.predicted.high
        for _, memory in trials
    )
    says = (
        "Memory that the steps take above initialisation, on the rank that took most. Each prediction was made just "
        "before its trial's result was known, from all earlier trials. "
        f"{inside} of {len(seen)} measured peaks are within their 90 % interval."
    )
    if budgets:
        says += f" The budget is what initialisation leaves of a slot: at least {bytes_shown(min(budgets) * size)}."
    rows = tuple(
        (
            f"{trial.number:04d}",
            trial.row.label,
            *(bytes_shown(each) for each in (memory.predicted.value, memory.predicted.low, memory.predicted.high)),
            "" if memory.measured is None else bytes_shown(memory.measured),
            "" if memory.budget is None else bytes_shown(memory.budget),
        )
        for trial, memory in trials
    )
    columns = ("trial", "candidate", "predicted", "low", "high", "measured", "budget")
    return Drawn(key, title, says, figure, columns, rows)


def progress_figure(view: StudyView) -> Drawn:
    key, title = "progress", "Best so far"
    ended = sorted((trial for trial in view.trials if not trial.is_profile), key=lambda trial: trial.ended)
    measured = [(trial, trial.row.value) for trial in ended if trial.row.value is not None]
    if not measured:
        return Drawn(key, title, "No trial has completed.", None)
    # The best so far, as a line of steps.
    metric = SEARCH_METRICS[view.metric]
    choose: Callable[[float, float], float] = min if metric.smaller_is_better else max
    best, steps = measured[0][1], []
    for _, value in measured:
        best = choose(best, value)
        steps.append(best)
    scale, unit = axis_unit(max(value for _, value in measured), metric.unit)
    figure = empty_figure("minutes since the study began", f"{view.metric} ({unit})")
    minutes = [trial.ended / 60 for trial, _ in measured]
    figure.add_scatter(
        name="best reading so far",
        x=minutes,
        y=[value / scale for value in steps],
        mode="lines",
        line={"shape": "hv", "color": COLOURS[0], "width": 2.5},
        hoverinfo="skip",
    )
    # The trials themselves.
    for name, colour, wanted in (("search", GREY, False), ("confirming", COLOURS[1], True)):
        chosen = [
            (at, trial, value)
            for at, (trial, value) in zip(minutes, measured, strict=True)
            if is_confirming(trial) is wanted
        ]
        if chosen:
            figure.add_scatter(
                name=f"{name} trials",
                x=[at for at, _, _ in chosen],
                y=[value / scale for _, _, value in chosen],
                mode="markers",
                marker={"color": colour, "size": 8, "symbol": "diamond" if wanted else "circle"},
                customdata=[f"{trial.number:04d} {trial.row.label}" for _, trial, _ in chosen],
                hovertemplate=f"%{{customdata}}<br>%{{y:,.4g}} {unit} at %{{x:.1f}} min<extra></extra>",
            )
    # The level of the user's configuration.
    own = view.before.get(view.metric)
    if own is not None:
        level = own / scale
        figure.add_hline(level, line={"color": RED, "dash": "dot", "width": 2})
        figure.add_annotation(
            x=1, xref="paper", y=level, text="yours", showarrow=False, xanchor="right", yanchor="top", font_color=RED
        )
    low = min(value for _, value in measured) / scale
    add_failed(figure, [(trial, low) for trial in ended if not trial.completed], minutes=True)
    figure.update_yaxes(rangemode="normal")
    says = (
        "Each dot is a trial when it ended. The line is the best single reading so far, which may be luck. The answer "
        "comes from the confirming trials."
    )
    rows = tuple(
        (f"{trial.number:04d}", trial.row.label, f"{at:.2f}", *map(metric.shown, (value, best)))
        for at, (trial, value), best in zip(minutes, measured, steps, strict=True)
    )
    return Drawn(key, title, says, figure, ("trial", "candidate", "minutes", view.metric, "best so far"), rows)


def knobs_figure(view: StudyView) -> Drawn:
    key, title = "knobs", "Which knobs mattered"
    effects = knob_effects(view)
    if not effects:
        return Drawn(
            key, title, f"That takes at least {FEWEST_TRIALS} completed trials that differ in something.", None
        )
    shown = effects[:_KNOBS_SHOWN][::-1]
    figure = empty_figure("the better value over the other (times)", "")
    figure.add_bar(
        base=1.0,
        x=[effect.gain - 1.0 for effect in shown],
        y=[effect.knob for effect in shown],
        orientation="h",
        marker={
            "color": [COLOURS[0] if effect.is_clear else GREY for effect in shown],
            "pattern": {"shape": ["/" if effect.trials is None else "" for effect in shown]},
        },
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [effect.high - effect.gain for effect in shown],
            "arrayminus": [effect.gain - effect.low for effect in shown],
            "thickness": 1.5,
        },
        customdata=[f"{effect.times}: {effect.best} over {effect.worst}, by {effect.source}" for effect in shown],
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        showlegend=False,
    )
    figure.update_layout(height=max(260, 90 + 38 * len(shown)))
    figure.update_yaxes(automargin=True, gridcolor="rgba(0,0,0,0)")
    clear = [f"{effect.knob} {effect.times}" for effect in effects if effect.is_clear]
    found = (
        f"Beyond the noise: {', '.join(clear)}." if clear else "With these trials, no effect is larger than the noise."
    )
    says = (
        "How many times better one of two values of a knob is than the other, with 90 % intervals. Trials that differ "
        "in this knob alone are compared directly. Hatched: no two trials do, so it is the expectation of the search's "
        f"model beside the best trial, from {len(measured_trials(view))} trials. {found} Grey: cannot be told from "
        "noise."
    )
    rows = tuple(
        (effect.knob, effect.best, effect.worst, effect.times, effect.interval, effect.source) for effect in effects
    )
    return Drawn(key, title, says, figure, ("knob", "better", "than", "times", "90 % interval", "seen by"), rows)


# The page.


def drawings(figures: Sequence[Drawn]) -> dict[str, Any]:
    return {figure.key: json.loads(figure.figure.to_json()) for figure in figures if figure.figure is not None}


@cache
def packed_plotly() -> str:
    """Plotly's code, compressed to two fifths; the page unpacks it."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


@cache
def page_template(name: str) -> jinja2.Template:
    """A file of `templates`. It escapes its values, and a value that it lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zerotune.trial_lib.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = environment.filters
    filters |= {"duration": duration, "setting": setting_text}
    filters["number"] = lambda value, unit="": "-" if value is None else quantity(value, unit).rstrip()
    filters["interval"] = lambda ends: f"{ends[0]:.2f} to {ends[1]:.2f}"
    filters["bytes"] = lambda count: "-" if count is None else bytes_shown(count)
    return environment.get_template(name)


def render_report(view: StudyView, figures: Sequence[Drawn]) -> str:
    return page_template("report.html.j2").render(
        view=view,
        figures=figures,
        drawings=drawings(figures),
        plotly=packed_plotly(),
        failures=failure_groups(view.trials),
        compared=_compared(view),
        trials=view.ranked,
        columns=trial_columns("report", view.metric),
        planned=[] if view.planned is None else planned_rows(view.planned),
        planned_columns=PLANNED_COLUMNS,
        planned_numbers=PLANNED_NUMBERS,
        worths=worth_rows(view),
        worth_columns=WORTH_COLUMNS,
        parts=[part for part in STEP_PARTS if any(account.shares.get(part) for account in view.why)],
        config=None if view.best_config is None else json.dumps(view.best_config, indent=2),
    )


def render_figures(view: StudyView, figures: Sequence[Drawn]) -> dict[str, str]:
    page = page_template("figure.html.j2")
    return {
        each.key: page.render(view=view, figures=[each], drawings=drawings([each]), plotly=packed_plotly())
        for each in figures
        if each.figure is not None
    }


def _compared(view: StudyView) -> list[tuple[str, str, str]]:
    """The winner's metrics beside the user's: name, own (empty if not measured), winner."""
    shown = {name: SEARCH_METRICS[name].shown for name in dict.fromkeys((view.metric, "throughput"))}
    after: Mapping[str, float] = view.after
    return [(name, show(view.before.get(name)), show(after[name])) for name, show in shown.items() if name in after]


# MLflow imports them, in a thread of its own. Plotly looks for them among the modules that are there, and fails if one
# is only half there.
_OF_OTHERS = ("numpy", "pandas", "pyarrow")


def await_imports() -> None:
    """Imports what plotly would use if it were there, or waits for the thread that does. Call it before any drawing."""
    for module in _OF_OTHERS:
        with contextlib.suppress(Exception):
            import_module(module)


def load_all() -> None:
    """Loads what a report needs, which takes a second."""
    await_imports()
    packed_plotly()
    for name in ("report.html.j2", "figure.html.j2"):
        page_template(name)
    # Plotly reads its own defaults for the first figure.
    empty_figure("", "").to_json()


def write_report(paths: StudyPaths) -> None:
    """Writes the report of a study in any state.

    Raises InputError if the study's record or history is damaged, and OSError if the disk is full.
    """
    await_imports()
    view = read_study(paths.root, KnownSecrets.of_study(paths))
    figures = draw_figures(view)
    write_whole(paths.report, render_report(view, figures))
    paths.figures.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
    for key, page in render_figures(view, figures).items():
        write_whole(paths.figures / f"{key}.html", page)
