"""A plan over the number of devices: speed and memory, and the fewest devices on which the program trains."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from trial_lib.foresee.plan.answer import likelihood
from trial_lib.foresee.plan.counts import MOST
from trial_lib.foresee.plan.plan_record import ForeseenRange, PlannedCount, PlannedDevices
from trial_lib.records.units import bytes_shown, percent, quantity
from trial_lib.report.figures import Drawn
from trial_lib.report.foreseen.names import faint
from trial_lib.report.foreseen.plan_parts import (
    FAR,
    LEGEND,
    bytes_range,
    bytes_unit,
    figure_text,
    name_above,
)
from trial_lib.report.plot_parts import COLOURS, GREY, RED, empty_figure

_FAILING = "nothing fits"


def speed_figure(devices: Sequence[PlannedDevices], says_same: str) -> Drawn:
    """Returns samples/s over the number of devices, with intervals, by kind of device.

    Args:
        devices: one for each kind.
        says_same: what stays the same over the numbers, in a sentence.
    """
    key, title = "speed", "Speed by the number of devices"
    figure = empty_figure("devices", "samples/s")
    for place, each in enumerate(devices):
        trains = [(count, count.samples_per_s) for count in each.counts if count.samples_per_s is not None]
        if trains:
            _add_curve(figure, each.device, place, trains, 1.0)
            _add_fewest(figure, each, place, {count.devices: speed.value for count, speed in trains})
    if not figure.data:
        return Drawn(key, title, "It trains on no number of these devices.", None)
    speeds = [speed for each in devices for count in each.counts if (speed := count.samples_per_s) is not None]
    decades = math.log10(max(speed.high for speed in speeds) / max(min(speed.low for speed in speeds), 1e-9))
    if decades >= 1:
        # Of a short axis 2 and 5 are named as well.
        figure.update_yaxes(type="log", dtick=1 if decades > 2 else "D2")
    else:
        figure.update_yaxes(rangemode="tozero")
    _devices_axis(figure, devices)
    says = (
        f"What all devices do together with the fastest arm of each number, and its 90 % interval. {says_same} "
        f"{_other_batches_text(devices)}{fewest_text(devices)}{_missing_text(devices)}"
    )
    return Drawn(key, title, says, figure, *_table(devices))


def count_memory_figure(devices: Sequence[PlannedDevices]) -> Drawn:
    """Returns the memory of one device over the number of devices."""
    key, title = "memory-counts", "Memory of one device by the number of devices"
    drawn = [(each, [(count, count.peak) for count in each.counts if count.peak is not None]) for each in devices]
    drawn = [(each, peaks) for each, peaks in drawn if peaks]
    if not drawn:
        return Drawn(key, title, "It was foreseen on no number of devices.", None)
    most = max(peak.value for _, peaks in drawn for _, peak in peaks)
    near = [each.usable for each, _ in drawn if each.usable <= FAR * most]
    # One device may need far more than it has. That is cut off, because the rest is what can be used.
    top = 1.08 * (max(min(most, 2 * max(near)), *near) if near else most)
    unit, size = bytes_unit(top)
    figure = empty_figure("devices", f"{unit} on one device")
    for place, (each, peaks) in enumerate(drawn):
        _add_curve(figure, each.device, place, peaks, size)
        _add_fewest(figure, each, place, {count.devices: peak.value / size for count, peak in peaks})
        if each.usable in near:
            figure.add_hline(each.usable / size, line={"color": _colour(place), "dash": "dot", "width": 2})
        else:
            name_above(figure, f"{each.device}: {bytes_shown(each.usable)}", GREY, line=place)
    figure.update_yaxes(range=[0, top / size])
    _devices_axis(figure, [each for each, _ in drawn])
    says = (
        "What one device needs with that arm, with its 90 % interval, against what it has (dotted). A cross is a "
        "number of devices on which nothing fits, with the arm that needs least."
    )
    return Drawn(key, title, says, figure, *_table([each for each, _ in drawn]))


def fewest_text(devices: Sequence[PlannedDevices]) -> str:
    """Returns the fewest devices of each kind, in a sentence."""
    known = [f"{each.fewest:,} x {each.device}" for each in devices if each.fewest is not None]
    none = [each.device for each in devices if each.fewest is None]
    sentences = [f"The fewest devices on which it trains (star): {', '.join(known)}."] if known else []
    return " ".join([*sentences, *(f"It trains on no number of {name}." for name in none)])


def _add_curve(
    figure: go.Figure, name: str, place: int, points: Sequence[tuple[PlannedCount, ForeseenRange]], size: float
) -> None:
    """Draws a line with the band of its intervals."""
    x = [count.devices for count, _ in points]
    if any(value.low < value.high for _, value in points):
        figure.add_scatter(
            x=[*x, *x[::-1]],
            y=[*(value.high / size for _, value in points), *(value.low / size for _, value in reversed(points))],
            fill="toself",
            mode="lines",
            line={"width": 0},
            fillcolor=faint(_colour(place), 0.18),
            hoverinfo="skip",
            showlegend=False,
        )
    y = [value.value / size for _, value in points]
    others = [count.other_batch is not None for count, _ in points]
    if any(others):
        figure.add_scatter(
            x=x,
            y=y,
            mode="lines",
            line={"color": _colour(place), "width": 2, "dash": "dash"},
            hoverinfo="skip",
            showlegend=False,
        )
    figure.add_scatter(
        name=name,
        x=x,
        # A gap in the solid line shows the dashed one.
        y=[None if is_other else height for height, is_other in zip(y, others, strict=True)],
        mode="lines",
        line={"color": _colour(place), "width": 2},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_scatter(
        name=name,
        x=x,
        y=y,
        mode="markers",
        marker={
            "color": _colour(place),
            "size": 7,
            "symbol": ["circle-open" if is_other else "circle" for is_other in others],
        },
        customdata=[_hover(count) for count, _ in points],
        hovertemplate="%{customdata}<extra></extra>",
    )
    failing = [(count.devices, value.value / size) for count, value in points if not count.micro_batch]
    if failing:
        is_first = not any(trace.name == _FAILING for trace in figure.data)
        figure.add_scatter(
            name=_FAILING,
            x=[number for number, _ in failing],
            y=[value for _, value in failing],
            mode="markers",
            marker={"symbol": "x-thin", "size": 10, "line": {"width": 2, "color": RED}},
            showlegend=is_first,
            hoverinfo="skip",
        )


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _add_fewest(figure: go.Figure, devices: PlannedDevices, place: int, heights: dict[int, float]) -> None:
    if devices.fewest in heights:
        figure.add_scatter(
            name=f"fewest: {devices.fewest:,} x {devices.device}",
            x=[devices.fewest],
            y=[heights[devices.fewest]],
            mode="markers",
            marker={"symbol": "star", "size": 15, "color": _colour(place), "line": {"width": 1, "color": "#ffffff"}},
            hovertemplate=f"the fewest devices: {devices.fewest:,}<extra></extra>",
        )


def _devices_axis(figure: go.Figure, devices: Sequence[PlannedDevices]) -> None:
    counts = sorted({count.devices for each in devices for count in each.counts})
    powers = [count for count in counts if count & (count - 1) == 0] or counts
    # Every second one has room on a phone.
    figure.update_xaxes(
        type="log",
        tickvals=powers,
        ticktext=[f"{count:,}" if index % 2 == 0 else "" for index, count in enumerate(powers)],
    )
    figure.update_xaxes(tickangle=0)
    figure.update_layout(legend=LEGEND)


def _hover(count: PlannedCount) -> str:
    lines = [f"{count.devices:,} devices: {count.label or 'nothing fits'}"]
    if count.micro_batch:
        lines.append(f"micro-batch {count.micro_batch}, accumulation {count.accumulation}")
    if count.other_batch is not None:
        lines.append(f"another global batch: {count.other_batch:,} samples")
    if count.samples_per_s is not None:
        lines.append(f"{figure_text(count.samples_per_s.value)} samples/s")
    if count.peak is not None:
        lines.append(f"{bytes_range(count.peak)} on one device")
    return "<br>".join(lines)


def _table(devices: Sequence[PlannedDevices]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Returns the columns and rows of the numbers. Scaling is the speed of a device, over that on the fewest."""
    rows: list[tuple[str, ...]] = []
    others = _has_other_batches(devices)
    for each in devices:
        first = next(
            ((count.devices, speed.value) for count in each.counts if (speed := count.samples_per_s) and speed.value),
            None,
        )
        for count in each.counts:
            speed = count.samples_per_s
            scaling = "-"
            if speed is not None and first is not None:
                scaling = percent(speed.value / count.devices / (first[1] / first[0]))
            rows.append(
                (
                    each.device,
                    f"{count.devices:,}",
                    count.label or "-",
                    f"{count.micro_batch} x {count.accumulation}" if count.micro_batch else "does not fit",
                    *(() if not others else ("-" if count.other_batch is None else f"{count.other_batch:,}",)),
                    likelihood(count.fits),
                    "-" if speed is None else quantity(speed.value, "samples/s"),
                    "-" if speed is None else f"{figure_text(speed.low)} to {figure_text(speed.high)}",
                    scaling,
                    "-" if count.peak is None else bytes_range(count.peak),
                )
            )
    batch = ("batch", "another global batch") if others else ("batch",)
    columns = ("device", "devices", "arm", *batch, "fits", "speed", "90 % interval", "scaling", "memory of one")
    return columns, tuple(rows)


def _has_other_batches(devices: Sequence[PlannedDevices]) -> bool:
    return any(count.other_batch is not None for each in devices for count in each.counts)


def _other_batches_text(devices: Sequence[PlannedDevices]) -> str:
    if not _has_other_batches(devices):
        return ""
    return (
        "Hollow points on a dashed line have another global batch, the next one that so many devices can divide: the "
        "training is then another. "
    )


def _missing_text(devices: Sequence[PlannedDevices]) -> str:
    """Returns why numbers are missing, in a sentence; empty if none are."""
    shown = [{count.devices for count in each.counts} for each in devices]
    if all(2**power in numbers for numbers in shown for power in range(MOST.bit_length())):
        return ""
    return (
        " Numbers are left out that are no whole hosts of several, that hold no whole replicas of the model, or on "
        "which no foreseen micro-batch divides the batch."
    )
