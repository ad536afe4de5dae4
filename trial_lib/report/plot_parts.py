"""The parts of figures: points, intervals, colours."""

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from trial_lib.records.candidate import Purpose
from trial_lib.report.study_view import Interval, TrialView

# Colour-blind readers can distinguish these, on white and on black. Each arm also has its own symbol.
COLOURS = ("#2f81d6", "#d9730d", "#159a74", "#c2529a", "#8567d6", "#a67c00", "#5b8c1d", "#d0454c")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "pentagon", "hexagon")
GREY, RED, GREEN = "#838b98", "#d0454c", "#159a74"


def empty_figure(x: str, y: str) -> go.Figure:
    """Returns an empty figure. The page sets the colours that depend on light or dark."""
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


def add_line_of_best(figure: go.Figure, of_arm: Sequence[TrialView], place: int) -> None:
    """Draws a line through an arm's best trial at each micro-batch size; `place` is the arm's index."""
    best: dict[int, float] = {}
    for trial in of_arm:
        assert trial.throughput is not None
        size = trial.row.micro_batch_size
        best[size] = max(trial.throughput.value, best.get(size, 0.0))
    figure.add_scatter(
        x=_beside(list(best), place),
        y=list(best.values()),
        mode="lines",
        line={"color": COLOURS[place % len(COLOURS)], "width": 1.5},
        opacity=0.6,
        showlegend=False,
        hoverinfo="skip",
    )


def add_points(figure: go.Figure, arm: str, of_arm: Sequence[TrialView], place: int) -> None:
    """Draws the trials of an arm, each with the interval of its steps."""
    intervals = [trial.throughput for trial in of_arm if trial.throughput is not None]
    figure.add_scatter(
        name=arm,
        x=_beside([trial.row.micro_batch_size for trial in of_arm], place),
        y=[interval.value for interval in intervals],
        error_y={**error_bars(intervals, 1.0), "thickness": 1, "width": 3},
        mode="markers",
        marker={
            "color": COLOURS[place % len(COLOURS)],
            "symbol": _SYMBOLS[place % len(_SYMBOLS)],
            "size": 9,
            "opacity": 0.85,
        },
        customdata=[f"{trial.number:04d} {trial.row.label}" for trial in of_arm],
        hovertemplate="%{customdata}<br>%{y:.1f} samples/s<extra></extra>",
    )


def add_confirmed(figure: go.Figure, name: str, size: int, throughput: Interval, is_winner: bool) -> None:
    """Draws a configuration that was measured again."""
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
    """Returns the bars of some points."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [(each.high - each.value) / unit for each in intervals],
        "arrayminus": [(each.value - each.low) / unit for each in intervals],
    }


def _beside(sizes: Sequence[int], place: int) -> list[float]:
    """Returns sizes with an arm's small offset, so that the points of other arms do not hide it."""
    return [size * 1.015 ** (place - 1.5) for size in sizes]


def ticks(sizes: Sequence[int]) -> list[int]:
    """Returns the labelled sizes of a logarithmic axis: each at least a quarter more than the one before."""
    ticks: list[int] = []
    for size in sizes:
        if not ticks or size >= 1.25 * ticks[-1]:
            ticks.append(size)
    return ticks


def three(interval: Interval | None, unit: float, style: str) -> tuple[str, str, str]:
    """Returns value, low and high for a table."""
    if interval is None:
        return "", "", ""
    low, value, high = (format(each / unit, style) for each in (interval.low, interval.value, interval.high))
    return value, low, high


def holds(interval: Interval, value: float) -> bool:
    """Returns whether a value is within an interval."""
    return interval.low <= value <= interval.high


def is_confirming(trial: TrialView) -> bool:
    """Returns whether a trial measured a configuration again."""
    return trial.row.purpose is Purpose.CONFIRM


def plain(text: str) -> str:
    """Returns a text escaped for plotly, which reads HTML as markup and `%{` as a variable."""
    return html.escape(text, quote=False).replace("%{", "% {")
