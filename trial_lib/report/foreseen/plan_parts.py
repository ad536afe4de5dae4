"""The parts that several figures of a plan share."""

import math
import re

import plotly.graph_objects as go

from trial_lib.foresee.plan.plan_record import ForeseenRange, PlannedArm, PlannedDevices
from trial_lib.records.units import bytes_shown
from trial_lib.report.plot_parts import RED
from trial_lib.report.study_view import Interval

FAR = 4
"""Times what is drawn. A device with more memory is written, not drawn, because it would flatten the rest."""

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))
# The legend has the bottom of a figure to itself, so that no name of an axis lies on it.
LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"}


def devices_name(devices: PlannedDevices) -> str:
    """Returns devices for people, such as `16 x a100-40gb on 2 hosts`."""
    hosts = "" if devices.nodes == 1 else f" on {devices.nodes} hosts"
    return f"{devices.count} x {devices.device}{hosts}"


def devices_key(devices: PlannedDevices) -> str:
    """Returns a word for addresses within the page, such as `a100-40gb-2x8`."""
    return re.sub(r"[^0-9A-Za-z]+", "-", devices.label).strip("-")


def arm_name(arm: PlannedArm) -> str:
    """Returns an arm with its batch, such as `z3, 4 x 8`."""
    if arm.stopped:
        return f"{arm.label}, not foreseen"
    return f"{arm.label}, {arm.micro_batch} x {arm.accumulation}" + ("" if arm.is_likely else ", does not fit")


def bytes_unit(most: float) -> tuple[str, float]:
    """Returns the unit of an axis that ends at so many bytes, and its size."""
    return next((unit for unit in _UNITS if most >= 2 * unit[1]), _UNITS[-1])


def add_level(figure: go.Figure, level: float, text: str, colour: str, dash: str) -> None:
    """Draws a line across a figure, named at its right end."""
    figure.add_hline(level, line={"color": colour, "dash": dash, "width": 2})
    figure.add_annotation(
        x=1,
        xref="paper",
        y=level,
        text=text,
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
        font_color=RED if colour == RED else None,
    )


def device_level(figure: go.Figure, memory: float, most: float, size: float) -> float:
    """Draws the memory of a device, or names it if it is far above the rest.

    Args:
        figure: drawn from `size` bytes a unit.
        memory: bytes of the device.
        most: bytes of the highest that is drawn.
        size: of the unit.

    Returns:
        The bytes of the highest that is drawn then.
    """
    if memory > FAR * most:
        name_above(figure, f"the device: {bytes_shown(memory)}", RED)
        return most
    add_level(figure, memory / size, f"the device: {bytes_shown(memory)}", RED, "dot")
    return max(memory * 1.04, most)


def name_above(figure: go.Figure, text: str, colour: str, line: int = 0) -> None:
    """Names a level that is above what is drawn: at the left, in a line of its own from the top.

    Levels that are drawn have their names at the right.
    """
    figure.add_annotation(
        x=0,
        y=1,
        xref="paper",
        yref="paper",
        yshift=-16 * line,
        text=f"{text} ↑",
        showarrow=False,
        xanchor="left",
        yanchor="top",
        font_color=RED if colour == RED else None,
    )


def as_interval(figure: ForeseenRange) -> Interval:
    """Returns a foreseen figure as an interval that figures draw."""
    return Interval(figure.value, figure.low, figure.high)


def bytes_range(figure: ForeseenRange) -> str:
    """Returns bytes with their interval."""
    if not figure.low < figure.high:
        return bytes_shown(figure.value)
    return f"{bytes_shown(figure.value)} ({bytes_shown(figure.low)} to {bytes_shown(figure.high)})"


def figure_text(value: float) -> str:
    """Returns a speed with three digits: more would be invented."""
    if abs(value) < 100:
        return f"{value:#.3g}"
    return f"{round(value, 2 - math.floor(math.log10(abs(value)))):,.0f}"
