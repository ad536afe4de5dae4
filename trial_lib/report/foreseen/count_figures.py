"""A plan over the number of devices: speed and memory, and the fewest devices on which the program trains."""

from collections.abc import Sequence

import plotly.graph_objects as go

from trial_lib.records.units import bytes_shown, percent, quantity
from trial_lib.report.figures import Drawn
from trial_lib.report.foreseen.names import faint
from trial_lib.report.foreseen.plan_parts import bytes_unit, fits_text, interval_bytes
from trial_lib.report.foreseen.plan_view import CountView, TargetView
from trial_lib.report.plot_parts import COLOURS, empty_figure
from trial_lib.report.study_view import Interval


def speed_figure(targets: Sequence[TargetView], says_same: str) -> Drawn:
    """Returns samples/s over the number of devices, with intervals, by kind of device."""
    key, title = "speed", "Speed by the number of devices"
    figure = empty_figure("devices", "samples/s")
    for place, target in enumerate(targets):
        trains = [count for count in target.counts if count.samples_per_s is not None]
        if trains:
            speeds = [count.samples_per_s for count in trains if count.samples_per_s is not None]
            _add_curve(figure, kind(target), place, trains, speeds, 1.0, _hovers(trains))
            _add_fewest(figure, target, place, {count.devices: _value(count) for count in trains})
    if not figure.data:
        return Drawn(key, title, "On no number of devices does it train.", None)
    figure.update_yaxes(type="log", nticks=8)
    _devices_axis(figure, targets)
    says = (
        f"What all devices together do, with the fastest arm of each number, and its 90 % interval. {says_same} "
        f"{fewest_sentence(targets)}"
    ).strip()
    return Drawn(key, title, says, figure, *_table(targets))


def count_memory_figure(targets: Sequence[TargetView], says_same: str) -> Drawn:
    """Returns the memory of one device over the number of devices."""
    key, title = "memory-counts", "Memory of one device by the number of devices"
    drawn = [target for target in targets if target.counts]
    if not drawn:
        return Drawn(key, title, "On no number of devices was it foreseen.", None)
    most = max(count.peak.value for target in drawn for count in target.counts)
    unit, size = bytes_unit(most)
    figure = empty_figure("devices", f"{unit} on one device")
    for place, target in enumerate(drawn):
        counts = list(target.counts)
        _add_curve(figure, kind(target), place, counts, [count.peak for count in counts], size, _hovers(counts))
        _add_fewest(figure, target, place, {count.devices: count.peak.value / size for count in counts})
        colour = COLOURS[place % len(COLOURS)]
        figure.add_hline(target.memory / size, line={"color": colour, "dash": "dot", "width": 2})
    highest = max(target.memory for target in drawn)
    figure.update_yaxes(range=[0, 1.08 * max(min(most, 3 * highest), highest) / size])
    _devices_axis(figure, drawn)
    says = (
        f"What one device needs, with its 90 % interval, against what it has (dotted). {says_same} Where nothing fits, "
        "it is the arm that needs least."
    )
    return Drawn(key, title, says.replace("  ", " "), figure, *_table(drawn))


def fewest_sentence(targets: Sequence[TargetView]) -> str:
    """Returns the fewest devices of each kind, in a sentence."""
    parts = [
        f"{target.fewest:,} of {kind(target)}" if target.fewest else f"none of {kind(target)}"
        for target in targets
        if target.counts
    ]
    return f"The fewest devices on which it trains (star): {', '.join(parts)}." if parts else ""


def kind(target: TargetView) -> str:
    """Returns the name of a kind of device, without its number."""
    return target.name.rpartition(" × ")[2]


def _add_curve(
    figure: go.Figure,
    name: str,
    place: int,
    counts: Sequence[CountView],
    values: Sequence[Interval],
    size: float,
    hovers: Sequence[str],
) -> None:
    """Draws a line with the band of its intervals."""
    colour = COLOURS[place % len(COLOURS)]
    x = [count.devices for count in counts]
    if any(value.has_ends for value in values):
        figure.add_scatter(
            x=[*x, *x[::-1]],
            y=[*(value.high / size for value in values), *(value.low / size for value in reversed(values))],
            fill="toself",
            mode="lines",
            line={"width": 0},
            fillcolor=faint(colour, 0.18),
            hoverinfo="skip",
            showlegend=False,
        )
    figure.add_scatter(
        name=name,
        x=x,
        y=[value.value / size for value in values],
        mode="lines+markers",
        line={"color": colour, "width": 2},
        marker={
            "color": colour,
            "size": 7,
            "symbol": ["circle" if count.micro_batch else "x-thin-open" for count in counts],
            "line": {"color": colour, "width": 2},
        },
        customdata=hovers,
        hovertemplate="%{customdata}<extra></extra>",
    )


def _add_fewest(figure: go.Figure, target: TargetView, place: int, heights: dict[int, float]) -> None:
    if target.fewest in heights:
        figure.add_scatter(
            name=f"fewest: {target.fewest} × {kind(target)}",
            x=[target.fewest],
            y=[heights[target.fewest]],
            mode="markers",
            marker={
                "symbol": "star",
                "size": 15,
                "color": COLOURS[place % len(COLOURS)],
                "line": {"width": 1, "color": "#ffffff"},
            },
            hovertemplate=f"the fewest devices: {target.fewest}<extra></extra>",
        )


def _devices_axis(figure: go.Figure, targets: Sequence[TargetView]) -> None:
    counts = sorted({count.devices for target in targets for count in target.counts})
    powers = [count for count in counts if count & (count - 1) == 0]
    figure.update_xaxes(type="log", tickvals=powers, ticktext=[f"{count:,}" for count in powers], tickangle=0)


def _hovers(counts: Sequence[CountView]) -> list[str]:
    return [
        f"{count.devices:,} devices: "
        + (f"{count.arm}, micro-batch {count.micro_batch}" if count.micro_batch else "does not fit")
        + (f"<br>{quantity(count.samples_per_s.value, 'samples/s')}" if count.samples_per_s else "")
        + f"<br>{interval_bytes(count.peak)} on one device"
        for count in counts
    ]


def _value(count: CountView) -> float:
    return 0.0 if count.samples_per_s is None else count.samples_per_s.value


def _table(targets: Sequence[TargetView]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Returns the columns and rows of the numbers. Scaling is the speed of a device, against that on the fewest."""
    rows: list[tuple[str, ...]] = []
    for target in targets:
        first = next((count for count in target.counts if count.samples_per_s is not None), None)
        for count in target.counts:
            speed = count.samples_per_s
            scaling = "-"
            if speed is not None and first is not None and _value(first):
                scaling = percent(speed.value / count.devices / (_value(first) / first.devices))
            rows.append(
                (
                    kind(target),
                    f"{count.devices:,}",
                    count.arm or "-",
                    str(count.micro_batch) if count.micro_batch else "does not fit",
                    fits_text(count.fits),
                    "-" if speed is None else quantity(speed.value, "samples/s"),
                    "-" if speed is None else f"{quantity(speed.low, '')}to {quantity(speed.high, '').rstrip()}",
                    scaling,
                    bytes_shown(count.peak.value),
                )
            )
    columns = ("device", "devices", "arm", "micro-batch", "fits", "speed", "90 % interval", "scaling", "memory")
    return columns, tuple(rows)
