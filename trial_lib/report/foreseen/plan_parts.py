"""The parts that several figures of a plan share."""

from collections.abc import Iterable

import plotly.graph_objects as go

from trial_lib.records.units import bytes_shown, percent
from trial_lib.report.foreseen.plan_view import ArmView
from trial_lib.report.plot_parts import RED
from trial_lib.report.study_view import Interval

_FAR = 3  # times what is drawn: a device with more memory is written, not drawn
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))


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
    if memory > _FAR * most:
        figure.add_annotation(
            x=1,
            y=1,
            xref="paper",
            yref="paper",
            text=f"the device has {bytes_shown(memory)} ↑",
            showarrow=False,
            xanchor="right",
            yanchor="top",
            font_color=RED,
        )
        return most
    add_level(figure, memory / size, f"the device: {bytes_shown(memory)}", RED, "dot")
    return max(memory * 1.04, most)


def peak_text(arm: ArmView) -> str:
    """Returns the memory that an arm is expected to need, with its interval."""
    return interval_bytes(arm.peak)


def interval_bytes(peak: Interval) -> str:
    """Returns bytes with their interval."""
    if not peak.has_ends:
        return bytes_shown(peak.value)
    return f"{bytes_shown(peak.value)} ({bytes_shown(peak.low)} to {bytes_shown(peak.high)})"


def fits_text(probability: float) -> str:
    """Returns a probability for people: none is certain."""
    if probability >= 0.995:
        return "> 99 %"
    return "< 1 %" if probability < 0.005 else percent(round(probability, 2))


def ordered(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Returns names without repetition, those of a known order first."""
    given = list(dict.fromkeys(names))
    first = [name for name in known if name in given]
    return first + [name for name in given if name not in first]
