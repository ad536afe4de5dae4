"""The figures of a plan's page, and the names and colours of what they draw."""

import math
import re
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from zerotune.trial_lib.plan.answer import likelihood
from zerotune.trial_lib.plan.evaluation import MOST
from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedCount, PlannedDevices, PlannedRange
from zerotune.trial_lib.records.units import axis_unit, bytes_shown, percent, quantity
from zerotune.trial_lib.report.html_report import COLOURS, GREY, RED, Drawn, empty_figure, error_bars, plain
from zerotune.trial_lib.report.study_view import Interval

BLUE, ORANGE, GREEN, PINK, VIOLET, OCHRE, OLIVE, CORAL = COLOURS

_KINDS = {
    "parameter": ("parameters", BLUE),
    "optimizer": ("optimizer states", VIOLET),
    "gradient": ("gradients", GREEN),
    "buffer": ("DeepSpeed's buffers", OCHRE),
    "input": ("batch", OLIVE),
    "activation": ("activations", ORANGE),
    "logits": ("logits and loss", CORAL),
    "temporary": ("temporary", PINK),
    # What the allocator, the context and libraries add.
    "overhead": ("context and fragments", GREY),
}
KIND_NAMES = {kind: name for kind, (name, _) in _KINDS.items()}
"""Kinds of memory as people read them."""
KIND_COLOURS = {kind: colour for kind, (_, colour) in _KINDS.items()}
"""One colour for a kind, in all figures of a page."""

MOMENT_NAMES = {
    "initialize": "initialise",
    "load": "load",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "between": "",
}
"""Moments of a run. Code between them has no name."""

_PARTS = {
    "compute": ("computing", BLUE),
    "launches": ("launches", PINK),
    "gathering": ("gathering parameters", ORANGE),
    "reducing": ("reducing gradients", GREEN),
    "exchanging": ("waiting for activations", CORAL),
    "transfers": ("copies to and from the host", OCHRE),
    "disk": ("NVMe drives", "#96694c"),
    "update": ("update", VIOLET),
    "host_update": ("update on the host", OLIVE),
    "data": ("loading data", GREY),
}
"""Parts of a step's time: name and colour, in all figures of a page."""


def faint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


FAR = 4
"""Times what is drawn. A device with more memory is written, not drawn, because it would flatten the rest."""

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))
# The legend has the bottom of a figure to itself, so that no name of an axis lies on it.
LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"}


def devices_name(devices: PlannedDevices) -> str:
    """Such as `16 x a100-40gb on 2 hosts`."""
    hosts = "" if devices.nodes == 1 else f" on {devices.nodes} hosts"
    return f"{devices.count} x {devices.device}{hosts}"


def devices_key(devices: PlannedDevices) -> str:
    """A word for addresses within the page, such as `a100-40gb-2x8`."""
    return re.sub(r"[^0-9A-Za-z]+", "-", devices.label).strip("-")


def arm_name(arm: PlannedArm) -> str:
    """An arm with its batch, such as `z3, 4 x 8`."""
    if arm.stopped:
        return f"{arm.label}, not foreseen"
    return f"{arm.label}, {arm.micro_batch} x {arm.accumulation}" + ("" if arm.is_likely else ", does not fit")


def bytes_unit(most: float) -> tuple[str, float]:
    """The unit of an axis that ends at so many bytes, and its size."""
    return next((unit for unit in _UNITS if most >= 2 * unit[1]), _UNITS[-1])


def add_level(figure: go.Figure, level: float, text: str, colour: str, dash: str) -> None:
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

    `most` is the bytes of the highest that is drawn, and the return value those of the highest that is drawn then. A
    unit of the figure has `size` bytes.
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


def bytes_range(figure: PlannedRange) -> str:
    if not figure.low < figure.high:
        return bytes_shown(figure.value)
    return f"{bytes_shown(figure.value)} ({bytes_shown(figure.low)} to {bytes_shown(figure.high)})"


def figure_text(value: float) -> str:
    """A speed with three digits: more would be invented."""
    if abs(value) < 100:
        return f"{value:#.3g}"
    return f"{round(value, 2 - math.floor(math.log10(abs(value)))):,.0f}"


# The arms of a plan on some devices, side by side: memory by kind, and where the time of a step goes.


def arms_memory_figure(devices: PlannedDevices) -> Drawn:
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
    parts = _ordered([arm.seconds for arm in arms], _PARTS)
    parts = [
        each for each in parts if any(arm.seconds.get(each, 0.0) > 1e-3 * sum(arm.seconds.values()) for arm in arms)
    ]
    names = [_PARTS.get(part, (part, GREY)) for part in parts]
    for part, (name, colour) in zip(parts, names, strict=True):
        seconds = [arm.seconds.get(part, 0.0) / divisors[arm.label] / scale for arm in arms]
        _add_bars(figure, name, colour, seconds, arms, unit)
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
    columns = ("arm", *(name for name, _ in names), "step", "hidden transfers")
    return Drawn(key, title, says, figure, columns, rows)


def _ordered(splits: Sequence[Mapping[str, float]], known: Mapping[str, object]) -> list[str]:
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
    # Adds a part of each arm's bar.
    figure.add_bar(
        name=name,
        x=values,
        y=[arm_name(arm) for arm in arms],
        orientation="h",
        marker={"color": colour, "opacity": [1.0 if arm.is_likely else 0.45 for arm in arms]},
        hovertemplate=f"%{{y}}<br>{plain(name)}: %{{x:,.3~g}} {unit}<extra></extra>",
    )


def _add_needs(figure: go.Figure, seen: Sequence[tuple[PlannedArm, PlannedRange]], size: float) -> None:
    # Adds the interval of each arm's whole need.
    figure.add_scatter(
        name="the whole need, 90 %",
        x=[peak.value / size for _, peak in seen],
        y=[arm_name(arm) for arm, _ in seen],
        error_x={**error_bars([Interval(peak.value, peak.low, peak.high) for _, peak in seen], size), "thickness": 1.5},
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 9, "color": GREY, "line": {"width": 2}},
        customdata=[bytes_range(peak) for _, peak in seen],
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
    )


# A plan over the number of devices: speed and memory, and the fewest devices on which the program trains.

_FAILING = "nothing fits"


def speed_figure(devices: Sequence[PlannedDevices], says_same: str) -> Drawn:
    """Speed by the number of devices, with one table for each kind. `says_same` says what stays the same over the
    numbers.
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
    known = [f"{each.fewest:,} x {each.device}" for each in devices if each.fewest is not None]
    none = [each.device for each in devices if each.fewest is None]
    sentences = [f"The fewest devices on which it trains (star): {', '.join(known)}."] if known else []
    return " ".join([*sentences, *(f"It trains on no number of {name}." for name in none)])


def _add_curve(
    figure: go.Figure, name: str, place: int, points: Sequence[tuple[PlannedCount, PlannedRange]], size: float
) -> None:
    # Draws a line with the band of its intervals.
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
    # The line, dashed where another global batch is trained.
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
    # The numbers on which nothing fits.
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
    # The columns and rows of the numbers. Scaling is the speed of a device, over that on the fewest.
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
    # Why numbers are missing, in a sentence; empty if none are.
    shown = [{count.devices for count in each.counts} for each in devices]
    if all(2**power in numbers for numbers in shown for power in range(MOST.bit_length())):
        return ""
    return (
        " Numbers are left out that are no whole hosts of several, that hold no whole replicas of the model, or on "
        "which no foreseen micro-batch divides the batch."
    )
