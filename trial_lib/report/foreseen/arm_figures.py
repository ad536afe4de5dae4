"""The arms of a plan on one device, side by side: memory by kind, and where the time of a step goes."""

import plotly.graph_objects as go

from trial_lib.records.units import axis_unit, bytes_shown, quantity
from trial_lib.report.figures import Drawn
from trial_lib.report.foreseen.names import KIND_COLOURS, KIND_NAMES
from trial_lib.report.foreseen.plan_parts import bytes_unit, interval_bytes, ordered
from trial_lib.report.foreseen.plan_view import ArmView, TargetView
from trial_lib.report.plot_parts import COLOURS, GREY, RED, empty_figure, error_bars, plain

_FAR = 3
_MOST_PARTS = len(COLOURS)


def arms_memory_figure(target: TargetView) -> Drawn:
    """Returns the memory of each arm at its micro-batch, by kind, against the device's memory."""
    key, title = f"memory-{target.key}", f"Memory of the arms on {target.name}"
    arms = [arm for arm in target.arms if arm.memory]
    if not arms:
        return Drawn(key, title, "No arm was foreseen.", None)
    unit, size = bytes_unit(max(arm.peak.value for arm in arms))
    kinds = ordered((kind for arm in arms for kind in arm.memory), KIND_NAMES)
    figure = _bars(f"{unit} on one device")
    drawn = arms[::-1]
    for kind in kinds:
        _add_bars(
            figure,
            KIND_NAMES.get(kind, kind),
            KIND_COLOURS.get(kind, GREY),
            [arm.memory.get(kind, 0.0) / size for arm in drawn],
            drawn,
            f"%{{x:,.3~g}} {unit}",
        )
    figure.add_scatter(
        name="the whole need, 90 %",
        x=[arm.peak.value / size for arm in drawn],
        y=[label(arm) for arm in drawn],
        error_x={**error_bars([arm.peak for arm in drawn], size), "thickness": 1.5},
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 9, "color": GREY, "line": {"width": 2}},
        customdata=[interval_bytes(arm.peak) for arm in drawn],
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
    )
    most = max(arm.peak.high for arm in arms)
    if target.memory <= _FAR * most:
        figure.add_vline(target.memory / size, line={"color": RED, "dash": "dot", "width": 2})
        most = max(most, target.memory)
    figure.add_annotation(
        x=min(target.memory, most) / size,
        y=1,
        yref="paper",
        text=f"the device: {bytes_shown(target.memory)}" + ("" if target.memory <= most else " →"),
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
        font_color=RED,
    )
    figure.update_xaxes(range=[0, 1.04 * most / size])
    says = (
        "What lies on one device at the moment of the peak, at the largest micro-batch that fits, or at one sample if "
        "none does. The thin bar is the 90 % interval of the whole need."
    )
    rows = tuple(
        (
            label(arm),
            *(bytes_shown(arm.memory.get(kind, 0.0)) for kind in kinds),
            interval_bytes(arm.peak),
            bytes_shown(arm.host) if arm.host else "-",
        )
        for arm in arms
    )
    columns = ("arm", *(KIND_NAMES.get(kind, kind) for kind in kinds), "the whole need", "on the host")
    return Drawn(key, title, says, figure, columns, rows)


def arms_time_figure(target: TargetView) -> Drawn:
    """Returns where the time of a step goes, by arm."""
    key, title = f"time-{target.key}", f"Where the time of a step goes on {target.name}"
    arms = [arm for arm in target.arms if arm.seconds and arm.micro_batch]
    if not arms:
        return Drawn(key, title, "No arm fits, so there is no step.", None)
    samples = {arm.micro_batch * arm.accumulation for arm in arms}
    divisors = {arm.name: 1 if len(samples) == 1 else arm.micro_batch * arm.accumulation for arm in arms}
    scale, unit = axis_unit(max(sum(arm.seconds.values()) / divisors[arm.name] for arm in arms), "s")
    figure = _bars(f"{unit} of a step" if len(samples) == 1 else f"{unit} for each sample of a device")
    drawn = arms[::-1]
    parts = _parts(arms)
    for place, part in enumerate(parts):
        seconds = [_part_seconds(arm, part, parts) / divisors[arm.name] / scale for arm in drawn]
        colour = COLOURS[place % len(COLOURS)] if part != _OTHERS else GREY
        _add_bars(figure, part, colour, seconds, drawn, f"%{{x:,.3~g}} {unit}")
    says = "The time of an optimizer step, by part, at the largest micro-batch that fits."
    if len(samples) > 1:
        says += " The arms' steps have different numbers of samples, so the bars are for one sample of a device."
    if any(arm.hidden_s for arm in arms):
        says += " Transfers count only while the device waits for them; the table has those beside the computation."
    rows = tuple(
        (
            label(arm),
            *(quantity(arm.seconds.get(part, 0.0), "s") for part in ordered(_all_parts(arms), ())),
            quantity(sum(arm.seconds.values()), "s"),
            quantity(arm.hidden_s, "s"),
        )
        for arm in arms
    )
    return Drawn(key, title, says, figure, ("arm", *ordered(_all_parts(arms), ()), "step", "hidden transfers"), rows)


_OTHERS = "the rest"


def _all_parts(arms: list[ArmView]) -> list[str]:
    return [part for arm in arms for part in arm.seconds]


def _parts(arms: list[ArmView]) -> list[str]:
    """Returns the parts that have a colour: the largest ones, then the rest as one."""
    parts = ordered(_all_parts(arms), ())
    if len(parts) <= _MOST_PARTS:
        return parts
    largest = sorted(parts, key=lambda part: -max(arm.seconds.get(part, 0.0) for arm in arms))[:_MOST_PARTS]
    return [part for part in parts if part in largest] + [_OTHERS]


def _part_seconds(arm: ArmView, part: str, parts: list[str]) -> float:
    if part != _OTHERS:
        return arm.seconds.get(part, 0.0)
    return sum(seconds for name, seconds in arm.seconds.items() if name not in parts)


def label(arm: ArmView) -> str:
    """Returns an arm with its micro-batch."""
    return f"{arm.name}, {arm.micro_batch} × {arm.accumulation}" if arm.micro_batch else f"{arm.name}, does not fit"


def _bars(x: str) -> go.Figure:
    figure = empty_figure(x, "")
    figure.update_layout(barmode="stack", bargap=0.35, margin={"t": 26}, legend={"traceorder": "normal"})
    figure.update_yaxes(automargin=True, showgrid=False)
    return figure


def _add_bars(
    figure: go.Figure, name: str, colour: str, values: list[float], arms: list[ArmView], value: str
) -> None:
    """Adds a part of each arm's bar."""
    figure.add_bar(
        name=name,
        x=values,
        y=[label(arm) for arm in arms],
        orientation="h",
        marker={"color": colour, "opacity": [1.0 if arm.micro_batch else 0.45 for arm in arms]},
        hovertemplate=f"%{{y}}<br>{plain(name)}: {value}<extra></extra>",
    )
    figure.update_layout(height=max(280, 130 + 30 * len(arms)))
