"""The arms of a plan on some devices, side by side: memory by kind, and where the time of a step goes."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from trial_lib.foresee.plan.plan_record import ForeseenRange, PlannedArm, PlannedDevices
from trial_lib.records.units import axis_unit, bytes_shown, quantity
from trial_lib.report.figures import Drawn
from trial_lib.report.foreseen.names import KIND_COLOURS, KIND_NAMES, PART_COLOURS, PART_NAMES
from trial_lib.report.foreseen.plan_parts import (
    FAR,
    LEGEND,
    arm_name,
    as_interval,
    bytes_range,
    bytes_unit,
    devices_key,
    devices_name,
)
from trial_lib.report.plot_parts import GREY, RED, empty_figure, error_bars, plain


def arms_memory_figure(devices: PlannedDevices) -> Drawn:
    """Returns the memory of each arm at its micro-batch, by kind, against the device's memory."""
    key, title = f"memory-{devices_key(devices)}", f"Memory of the arms on {devices_name(devices)}"
    seen = [(arm, arm.peak) for arm in devices.arms if arm.peak is not None and arm.memory]
    if not seen:
        return Drawn(key, title, "No arm was foreseen.", None)
    arms = [arm for arm, _ in seen]
    unit, size = bytes_unit(max(peak.value for _, peak in seen))
    kinds = _ordered([arm.memory for arm in arms], KIND_NAMES)
    figure = _bars(f"{unit} on one device", arms)
    for kind in kinds:
        sizes = [arm.memory.get(kind, 0.0) / size for arm in arms]
        _add_bars(figure, KIND_NAMES.get(kind, kind), KIND_COLOURS.get(kind, GREY), sizes, arms, unit)
    _add_needs(figure, seen, size)
    most = max(peak.high for _, peak in seen)
    is_drawn = devices.usable <= FAR * most
    if is_drawn:
        figure.add_vline(devices.usable / size, line={"color": RED, "dash": "dot", "width": 2})
        most = max(most, devices.usable)
    right = 1.04 * most / size
    at = min(devices.usable / size, right)
    figure.add_annotation(
        x=at,
        y=1,
        yref="paper",
        text=f"the device: {bytes_shown(devices.usable)}" + ("" if is_drawn else " →"),
        showarrow=False,
        xanchor="right" if at > right / 2 else "left",
        yanchor="bottom",
        font_color=RED,
    )
    figure.update_xaxes(range=[0, right])
    says = (
        "What lies on one device at the peak of a step, at the arm's micro-batch x accumulation. Faint arms do not "
        "fit. The thin bar is the 90 % interval of the whole need."
    )
    rows = tuple(
        (
            arm_name(arm),
            *(bytes_shown(arm.memory.get(kind, 0.0)) for kind in kinds),
            bytes_range(peak),
            bytes_shown(arm.host) if arm.host else "-",
        )
        for arm, peak in seen
    )
    columns = ("arm", *(KIND_NAMES.get(kind, kind) for kind in kinds), "the whole need", "on the host")
    return Drawn(key, title, says, figure, columns, rows)


def arms_time_figure(devices: PlannedDevices) -> Drawn:
    """Returns where the time of a step goes, by arm."""
    key, title = f"time-{devices_key(devices)}", f"Where the time of a step goes on {devices_name(devices)}"
    arms = [arm for arm in devices.arms if arm.seconds and arm.is_likely]
    if not arms:
        return Drawn(key, title, "No arm fits, so there is no step.", None)
    samples = {arm.label: arm.micro_batch * arm.accumulation for arm in arms}
    is_same = len(set(samples.values())) == 1
    divisors = {label: 1 if is_same else count for label, count in samples.items()}
    scale, unit = axis_unit(max(sum(arm.seconds.values()) / divisors[arm.label] for arm in arms), "s")
    words = {"s": "seconds", "ms": "milliseconds"}[unit]
    figure = _bars(f"{words} of a step" if is_same else f"{words} for each sample of a device", arms)
    parts = [part for part in _ordered([arm.seconds for arm in arms], PART_NAMES) if _is_seen(part, arms)]
    for part in parts:
        seconds = [arm.seconds.get(part, 0.0) / divisors[arm.label] / scale for arm in arms]
        _add_bars(figure, PART_NAMES.get(part, part), PART_COLOURS.get(part, GREY), seconds, arms, unit)
    says = (
        "The time of an optimizer step, by part. Besides computing and the update, a part is the time that the device "
        "waits for it. The table has the transfers that go on beside the computation."
    )
    if not is_same:
        says += " The arms' steps have different numbers of samples, so the bars are for one sample of a device."
    rows = tuple(
        (
            arm_name(arm),
            *(quantity(arm.seconds.get(part, 0.0), "s") for part in parts),
            quantity(sum(arm.seconds.values()), "s"),
            quantity(arm.hidden_s, "s"),
        )
        for arm in arms
    )
    columns = ("arm", *(PART_NAMES.get(part, part) for part in parts), "step", "hidden transfers")
    return Drawn(key, title, says, figure, columns, rows)


def _is_seen(part: str, arms: Sequence[PlannedArm]) -> bool:
    """Returns whether a part takes a thousandth of any arm's step."""
    return any(arm.seconds.get(part, 0.0) > 1e-3 * sum(arm.seconds.values()) for arm in arms)


def _ordered(splits: Sequence[Mapping[str, float]], known: Mapping[str, str]) -> list[str]:
    """Returns the names of all splits, in the order of the known ones."""
    given = dict.fromkeys(name for split in splits for name, size in split.items() if size)
    return [name for name in known if name in given] + [name for name in given if name not in known]


def _bars(x: str, arms: Sequence[PlannedArm]) -> go.Figure:
    figure = empty_figure(x, "")
    figure.update_layout(barmode="stack", bargap=0.35, margin={"t": 26}, legend=LEGEND)
    figure.update_layout(height=max(300, 150 + 30 * len(arms)))
    # The first arm is the uppermost.
    figure.update_yaxes(automargin=True, showgrid=False, autorange="reversed")
    return figure


def _add_bars(
    figure: go.Figure, name: str, colour: str, values: list[float], arms: Sequence[PlannedArm], unit: str
) -> None:
    """Adds a part of each arm's bar."""
    figure.add_bar(
        name=name,
        x=values,
        y=[arm_name(arm) for arm in arms],
        orientation="h",
        marker={"color": colour, "opacity": [1.0 if arm.is_likely else 0.45 for arm in arms]},
        hovertemplate=f"%{{y}}<br>{plain(name)}: %{{x:,.3~g}} {unit}<extra></extra>",
    )


def _add_needs(figure: go.Figure, seen: Sequence[tuple[PlannedArm, ForeseenRange]], size: float) -> None:
    """Adds the interval of each arm's whole need."""
    figure.add_scatter(
        name="the whole need, 90 %",
        x=[peak.value / size for _, peak in seen],
        y=[arm_name(arm) for arm, _ in seen],
        error_x={**error_bars([as_interval(peak) for _, peak in seen], size), "thickness": 1.5},
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 9, "color": GREY, "line": {"width": 2}},
        customdata=[bytes_range(peak) for _, peak in seen],
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
    )
