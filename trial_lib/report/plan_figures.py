"""The figures of a plan's page, those of one optimizer step among them, and the names and colours of what they draw."""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun
from zerotune.trial_lib.plan.answer import MOMENT_WORDS, likelihood, money
from zerotune.trial_lib.plan.device_memory import rounded
from zerotune.trial_lib.plan.evaluation import MOST
from zerotune.trial_lib.plan.plan_record import (
    TRAINING_HOURS,
    PlannedArm,
    PlannedCount,
    PlannedDevices,
    PlannedRange,
    PlannedTraining,
    TrainingRow,
)
from zerotune.trial_lib.records.units import bytes_shown, percent, quantity, scaled_unit
from zerotune.trial_lib.report.chart import (
    COLOURS,
    DASHED,
    GREY,
    RED,
    Area,
    Axis,
    Band,
    Bars,
    Chart,
    Curve,
    Drawn,
    Level,
    Points,
    Remark,
)

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


FAR = 4
"""Times what is drawn. A device with more memory is written, not drawn, because it would flatten the rest."""

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))


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


def device_level(figure: Chart, memory: float, most: float, size: float) -> float:
    """Draws the memory of a device, or names it if it is far above the rest.

    `most` is the bytes of the highest that is drawn, and the return value those of the highest that is drawn then. A
    unit of the figure has `size` bytes.
    """
    if memory > FAR * most:
        figure.notes.append(Remark(f"the device: {bytes_shown(memory)} ↑", is_warning=True, is_left=True))
        return most
    figure.levels.append(Level(memory / size, f"the device: {bytes_shown(memory)}", RED))
    return max(memory * 1.04, most)


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
    most = max(peak.high for _, peak in seen)
    is_drawn = devices.usable <= FAR * most
    right = 1.04 * (max(most, devices.usable) if is_drawn else most) / size
    figure = Chart(Axis(f"{unit} on one device", ends=(0, right)), Axis(""), names=[arm_name(arm) for arm in arms])
    parts = {
        KIND_NAMES.get(kind, kind): (KIND_COLOURS.get(kind, GREY), [arm.memory.get(kind, 0.0) / size for arm in arms])
        for kind in kinds
    }
    _stack(figure, parts, arms, unit)
    figure.marks.append(
        Points(
            "the whole need, 90 %",
            GREY,
            [peak.value / size for _, peak in seen],
            range(len(seen)),
            [f"{arm_name(arm)}: {bytes_range(peak)}" for arm, peak in seen],
            [(peak.low / size, peak.high / size) for _, peak in seen],
            is_sideways=True,
            symbol="bar",
            size=5,
        )
    )
    device = f"the device: {bytes_shown(devices.usable)}"
    if is_drawn:
        figure.levels.append(Level(devices.usable / size, device, RED, is_upright=True))
    else:
        figure.notes.append(Remark(f"{device} →", is_warning=True))
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
    scale, unit = scaled_unit(max(sum(arm.seconds.values()) / divisors[arm.label] for arm in arms), "s")
    words = {"s": "seconds", "ms": "milliseconds"}[unit]
    name = f"{words} of a step" if is_same else f"{words} for each sample of a device"
    figure = Chart(Axis(name, from_zero=True), Axis(""), names=[arm_name(arm) for arm in arms])
    parts = _ordered([arm.seconds for arm in arms], _PARTS)
    parts = [
        each for each in parts if any(arm.seconds.get(each, 0.0) > 1e-3 * sum(arm.seconds.values()) for arm in arms)
    ]
    names = [_PARTS.get(part, (part, GREY)) for part in parts]
    shares = {
        name: (colour, [arm.seconds.get(part, 0.0) / divisors[arm.label] / scale for arm in arms])
        for part, (name, colour) in zip(parts, names, strict=True)
    }
    _stack(figure, shares, arms, unit)
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


def _stack(figure: Chart, parts: Mapping[str, tuple[str, list[float]]], arms: Sequence[PlannedArm], unit: str) -> None:
    # Adds the parts of each arm's bar, by name with colour and sizes.
    starts = [0.0] * len(arms)
    for name, (colour, sizes) in parts.items():
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        texts = [f"{arm_name(arm)}: {name} {size:,.3g} {unit}" for arm, size in zip(arms, sizes, strict=True)]
        figure.marks.append(Bars(name, colour, starts, ends, texts, faint=[not arm.is_likely for arm in arms]))
        starts = ends


# A plan over the number of devices: speed and memory, and the fewest devices on which the program trains.

_FAILING = "nothing fits"


def speed_figure(devices: Sequence[PlannedDevices], says_same: str) -> Drawn:
    """Speed by the number of devices, with one table for each kind. `says_same` says what stays the same over the
    numbers.
    """
    key, title = "speed", "Speed by the number of devices"
    speeds = [speed for each in devices for count in each.counts if (speed := count.samples_per_s) is not None]
    if not speeds:
        return Drawn(key, title, "It trains on no number of these devices.", None)
    is_log = max(speed.high for speed in speeds) >= 10 * max(min(speed.low for speed in speeds), 1e-9)
    figure = Chart(_devices_axis(devices), Axis("samples/s", is_log=is_log, from_zero=not is_log))
    for place, each in enumerate(devices):
        trains = [(count, count.samples_per_s) for count in each.counts if count.samples_per_s is not None]
        if trains:
            _add_curve(figure, each.device, place, trains, 1.0)
            _add_fewest(figure, each, place, {count.devices: speed.value for count, speed in trains})
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
    axis = _devices_axis([each for each, _ in drawn])
    figure = Chart(axis, Axis(f"{unit} on one device", ends=(0, top / size)))
    for place, (each, peaks) in enumerate(drawn):
        _add_curve(figure, each.device, place, peaks, size)
        _add_fewest(figure, each, place, {count.devices: peak.value / size for count, peak in peaks})
        if each.usable in near:
            figure.levels.append(Level(each.usable / size, "", _colour(place)))
        else:
            figure.notes.append(Remark(f"{each.device}: {bytes_shown(each.usable)} ↑", is_left=True, line=place))
    says = (
        "What one device needs with that arm, with its 90 % interval, against what it has (dotted). A cross is a "
        "number of devices on which nothing fits, with the arm that needs least."
    )
    return Drawn(key, title, says, figure, *_table([each for each, _ in drawn]))


def training_figure(whole: PlannedTraining) -> Drawn:
    """Hours and price of the whole training. Without prices it has the table alone."""
    key, title = "training", "The whole training"
    has_prices = any(row.price for row in whole.rows)
    columns: tuple[str, ...] = ("devices", "arm", "batch", "fits", "hours", "90 % interval", "device-hours")
    rows = tuple(
        (
            row.devices + (" (another training)" if row.is_other else ""),
            " ".join([row.label, *row.switches.values()]),
            f"{row.micro_batch} x {row.accumulation}",
            likelihood(row.fits),
            figure_text(row.hours.value),
            f"{figure_text(row.hours.low)} to {figure_text(row.hours.high)}",
            figure_text(row.device_hours.value),
            *((money(row.price.value), f"{money(row.price.low)} to {money(row.price.high)}") if row.price else ()),
        )
        for row in whole.rows
        if row.price or not has_prices
    )
    columns += ("price", "90 % interval of it") if has_prices else ()
    figure = None
    if has_prices:
        figure = Chart(Axis("hours", is_log=True), Axis("price", is_log=True))
        for place, device in enumerate(dict.fromkeys(row.device for row in whole.rows)):
            of_kind = [row for row in whole.rows if row.device == device and row.price and row.price.value > 0]
            of_kind = sorted((row for row in of_kind if not row.is_other), key=lambda row: row.hours.value)
            _add_trainings(figure, device, _colour(place), of_kind)
        if whole.within is not None:
            figure.levels.append(Level(whole.within, f"{whole.within:g} hours", RED, is_upright=True))
    says = f"{whole.length}. {TRAINING_HOURS} {whole.answer}" + (
        " A point is a number of devices, with its best arm. The bar is the 90 % interval of a price, and the hours "
        "have the same. The star is the answer."
        if has_prices
        else ""
    )
    return Drawn(key, title, says, figure, columns, rows)


def _add_trainings(figure: Chart, device: str, colour: str, rows: Sequence[TrainingRow]) -> None:
    known = [(row, row.price) for row in rows if row.price is not None]
    if not known:
        return
    lines = [row for row in known if not row[0].switches] or known
    figure.marks.append(Curve("", colour, [row.hours.value for row, _ in lines], [price.value for _, price in lines]))
    for symbol, of_symbol in (
        ("circle", [each for each in known if not each[0].is_best]),
        ("star", [each for each in known if each[0].is_best]),
    ):
        if of_symbol:
            figure.marks.append(
                Points(
                    device if symbol == "circle" else f"the answer: {of_symbol[0][0].devices}",
                    colour,
                    [row.hours.value for row, _ in of_symbol],
                    [price.value for _, price in of_symbol],
                    [
                        f"{row.devices}: {figure_text(row.hours.value)} hours, {money(price.value)}"
                        for row, price in of_symbol
                    ],
                    [(price.low, price.high) if row.marks else (price.value, price.value) for row, price in of_symbol],
                    symbol=symbol,
                    size=9 if symbol == "star" else 4.5,
                )
            )


def fewest_text(devices: Sequence[PlannedDevices]) -> str:
    known = [f"{each.fewest:,} x {each.device}" for each in devices if each.fewest is not None]
    none = [each.device for each in devices if each.fewest is None]
    sentences = [f"The fewest devices on which it trains (star): {', '.join(known)}."] if known else []
    return " ".join([*sentences, *(f"It trains on no number of {name}." for name in none)])


def _add_curve(
    figure: Chart, name: str, place: int, points: Sequence[tuple[PlannedCount, PlannedRange]], size: float
) -> None:
    # Draws a line with the band of its intervals.
    x, colour = [count.devices for count, _ in points], _colour(place)
    if any(value.low < value.high for _, value in points):
        lows, highs = [value.low / size for _, value in points], [value.high / size for _, value in points]
        figure.marks.append(Area("", colour, x, lows, highs))
    # The line, dashed where another global batch is trained. A gap in the solid line shows the dashed one.
    y = [value.value / size for _, value in points]
    others = [count.other_batch is not None for count, _ in points]
    if any(others):
        figure.marks.append(Curve("", colour, x, y, DASHED))
    solid = [None if is_other else height for height, is_other in zip(y, others, strict=True)]
    figure.marks.append(Curve("", colour, x, solid))
    figure.marks.append(Points(name, colour, x, y, [_hover(count) for count, _ in points], hollow=others))
    # The numbers on which nothing fits.
    failing = [(count.devices, value.value / size) for count, value in points if not count.micro_batch]
    if failing:
        is_first = not any(mark.name == _FAILING for mark in figure.marks)
        numbers, heights = zip(*failing, strict=True)
        texts = [_FAILING] * len(failing)
        figure.marks.append(Points(_FAILING if is_first else "", RED, numbers, heights, texts, symbol="x"))


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _add_fewest(figure: Chart, devices: PlannedDevices, place: int, heights: dict[int, float]) -> None:
    if devices.fewest in heights:
        name, height = f"fewest: {devices.fewest:,} x {devices.device}", heights[devices.fewest]
        figure.marks.append(Points(name, _colour(place), [devices.fewest], [height], [name], symbol="star", size=8))


def _devices_axis(devices: Sequence[PlannedDevices]) -> Axis:
    counts = sorted({count.devices for each in devices for count in each.counts})
    powers = [count for count in counts if count & (count - 1) == 0] or counts
    return Axis("devices", is_log=True, ticks=[(count, f"{count:,}") for count in powers])


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
    return "; ".join(lines)


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


# The memory of one optimizer step, drawn: what is alive when, by kind.

DEVICE, HOST = ("device",), ("host", "pinned")

# What lies longest is drawn lowest, so that what comes and goes rests on a flat floor.
_FROM_BELOW = ("parameter", "optimizer", "gradient", "buffer", "input", "activation", "temporary")
# A point more for each pixel of a drawing shows nothing more.
_MOST_POINTS = 600

_Point = tuple[int, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A moment of a step: `start` is the number of its first event, `end` that of the event after its last one."""

    name: str
    micro_batch: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class StepLine:
    samples: int  # of a micro-batch
    kinds: tuple[str, ...]  # of memory, the bottom of the drawing first
    events: tuple[int, ...]  # number of each point, from the step's first event
    bytes: tuple[tuple[float, ...], ...]  # of each kind at each point; as many as `events`
    parts: tuple[StepPart, ...]  # the moments of the step, in order
    peak: int  # the index of the point with the most bytes
    skipped: int = 0  # micro-batches between the first and the last one. They are left out.

    @property
    def micro_batches(self) -> int:
        """The micro-batches of the step, those that are left out included."""
        return max((part.micro_batch for part in self.parts), default=-1) + 1

    @property
    def most(self) -> float:
        return sum(self.bytes[self.peak])

    @property
    def peak_part(self) -> StepPart:
        """The moment of the peak. A point is the state after an event, so it may end its moment."""
        event = self.events[self.peak]
        return next((part for part in self.parts if part.start < event <= part.end), self.parts[0])


def step_line(run: ForeseenRun, places: Sequence[str] = DEVICE) -> StepLine | None:
    """The live bytes of the run's last optimizer step. In the first one the optimizer's states appear.

    `places` are names of `PLACES`, which are added up. None if no step updates, or nothing lies there.
    """
    update = MOMENTS.index("update")
    step = max((moment.step for moment in run.moments if moment.name == update), default=0)
    if not step:
        return None
    # The live bytes by kind: before the first event, and after each.
    now = [0.0] * len(KINDS)
    live = [tuple(now)]
    for event in run.events:
        storage = run.storages[event.storage]
        if (place := PLACES[storage.place]) in places:
            now[storage.kind] += rounded(storage.size, place) * (1 if event.is_made else -1)
        live.append(tuple(now))
    # Micro-batches of a pipeline interleave. Otherwise those between the first and the last repeat the others.
    spans = [(moment, events) for moment, events in run.events_by_moment() if moment.step == step and events]
    last, skipped = max((moment.micro_batch for moment, _ in spans), default=0), 0
    if not run.is_pipeline:
        spans, skipped = [each for each in spans if each[0].micro_batch in (0, last)], max(last - 1, 0)
    parts: list[StepPart] = []
    points: list[_Point] = []
    shown = 0
    for moment, events in spans:
        end = shown + len(events)
        parts.append(StepPart(name=MOMENTS[moment.name], micro_batch=moment.micro_batch, start=shown, end=end))
        points += [(shown + index, live[events.start + index]) for index in range(len(events) + 1)]
        shown = end
    if not any(any(each) for _, each in points):
        return None
    points = _thinned(points)
    filled = [KINDS.index(kind) for kind in _FROM_BELOW if any(each[KINDS.index(kind)] for _, each in points)]
    return StepLine(
        samples=run.micro_batch,
        kinds=tuple(KINDS[index] for index in filled),
        events=tuple(event for event, _ in points),
        bytes=tuple(tuple(each[index] for index in filled) for _, each in points),
        parts=tuple(parts),
        peak=max(range(len(points)), key=lambda index: sum(points[index][1])),
        skipped=skipped,
    )


def _thinned(points: list[_Point]) -> list[_Point]:
    size = -(-2 * len(points) // _MOST_POINTS)
    if size <= 2:
        return points
    kept: list[_Point] = []
    for start in range(0, len(points), size):
        group = range(start, min(start + size, len(points)))
        ends = {choose(group, key=lambda index: sum(points[index][1])) for choose in (min, max)}
        kept += [points[index] for index in sorted(ends)]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


# Of the drawing's width, so that each moment has room for its name, on a phone too. Others have room to be seen.
_WIDTH_OF_A_LETTER = 0.025
_LEAST_WIDTH = 0.004
_BANDS = {"load": OLIVE, "forward": BLUE, "backward": GREY, "update": VIOLET, "initialise": OCHRE}
_ROWS = 60  # of the table: a reader of numbers wants the course, not each event


def line_figure(devices: PlannedDevices, line: StepLine) -> Drawn:
    arm = devices.chosen
    peak = arm.peak if arm is not None else None
    # The run of another micro-batch needs another amount.
    needed = peak.value if peak is not None and arm is not None and arm.micro_batch == line.samples else 0.0
    # A small model's need is mostly the context, which would flatten the rest.
    most = max(line.most, needed) if needed <= FAR * line.most else line.most
    unit = bytes_unit(most)
    figure = _drawn(line, *unit)
    says = (
        f"What is alive on one device, by kind, over the events of one step: allocations and their ends. "
        f"{_peak_sentence(line)}"
    )
    if peak is not None and needed > line.most:
        if needed <= most:
            figure.levels.append(Level(needed / unit[1], "the whole need", GREY, DASHED))
        else:
            figure.notes.append(Remark(f"the whole need: {bytes_shown(needed)} ↑", is_left=True, line=1))
        says += f" With the context, the libraries and the allocator's fragments the device needs {bytes_range(peak)}."
    if arm is not None and arm.micro_batch != line.samples:
        says += f" This is the step of micro-batch {line.samples}. That of {arm.micro_batch} does not follow from it."
    if arm is not None and arm.accumulation != line.micro_batches:
        seen = "one micro-batch" if line.micro_batches == 1 else f"{line.micro_batches} micro-batches"
        says += f" The step was foreseen with {seen}, and the arm's has {arm.accumulation}."
    highest = device_level(figure, devices.usable, most, unit[1])
    figure.y = replace(figure.y, ends=(0, 1.06 * highest / unit[1]))
    title = f"Memory of one step on {devices_name(devices)}" + (f": {arm.label}" if arm else "")
    return Drawn(f"line-{devices_key(devices)}", title, says + _skipped(line), figure, *_step_table(line))


def host_figure(devices: PlannedDevices, line: StepLine) -> Drawn:
    unit = bytes_unit(line.most)
    figure = _drawn(line, *unit)
    says = (
        f"What one rank keeps in its host's memory during the same step. {_peak_sentence(line)} Each rank of the host "
        "keeps its own."
    )
    title = f"Host memory of that step on {devices_name(devices)}"
    return Drawn(f"host-{devices_key(devices)}", title, says + _skipped(line), figure, *_step_table(line))


def _drawn(line: StepLine, unit: str, size: float) -> Chart:
    x_axis = Axis("events of the step, in their order", ends=(0, 1), ticks=())
    figure = Chart(x_axis, Axis(unit, ends=(0, 1.06 * line.most / size)))
    place = places(line)
    x = [place(event) for event in line.events]
    floor = [0.0] * len(x)
    for index, kind in enumerate(line.kinds):
        name, colour = KIND_NAMES.get(kind, kind), KIND_COLOURS.get(kind, GREY)
        top = [below + each[index] / size for below, each in zip(floor, line.bytes, strict=True)]
        figure.marks.append(Area(name, colour, x, floor, top, opacity=0.75, is_stepped=True))
        floor = top
    for part in line.parts:
        name = MOMENT_NAMES.get(part.name, part.name)
        if name:
            figure.bands.append(Band(place(part.start), place(part.end), name, _BANDS[name]))
    if line.skipped:
        later = next(part for part in line.parts if part.micro_batch > 0)
        figure.levels.append(Level(place(later.start), "", GREY, is_upright=True))
    peak = f"the peak: {bytes_shown(line.most)}"
    figure.marks.append(Points("the peak", RED, [x[line.peak]], [line.most / size], [peak], symbol="diamond", size=6))
    return figure


def places(line: StepLine) -> Callable[[float], float]:
    """The function from an event's number to its place in the drawing, from 0 to 1.

    Within a moment the events are evenly spaced. A moment of few events is widened, so that its name has room.
    """
    events = [part.end - part.start for part in line.parts]
    least = [max(_LEAST_WIDTH, _WIDTH_OF_A_LETTER * len(MOMENT_NAMES.get(part.name, ""))) for part in line.parts]
    least = [each / max(1.0, sum(least)) for each in least]
    widths = [0.0] * len(events)
    free = set(range(len(events)))
    while free:
        left = 1.0 - sum(width for index, width in enumerate(widths) if index not in free)
        total = sum(events[index] for index in free)
        narrow = {index for index in free if left * events[index] / total < least[index]}
        for index in narrow or free:
            widths[index] = least[index] if narrow else left * events[index] / total
        free -= narrow or free
    starts = [sum(widths[:index]) for index in range(len(widths))]

    def place(event: float) -> float:
        index = max(bisect_right([part.start for part in line.parts], event) - 1, 0)
        share = (event - line.parts[index].start) / max(events[index], 1)
        return starts[index] + widths[index] * min(share, 1.0)

    return place


def _peak_sentence(line: StepLine) -> str:
    part = line.peak_part
    where = MOMENT_WORDS.get(part.name, part.name)
    which = f" of micro-batch {part.micro_batch + 1}" if line.micro_batches > 1 and part.name != "update" else ""
    most = sorted(zip(line.bytes[line.peak], line.kinds, strict=True), reverse=True)
    parts = [f"{bytes_shown(count)} {KIND_NAMES.get(kind, kind)}" for count, kind in most[:3] if count]
    return f"The peak is {where}{which}: {bytes_shown(line.most)}, of them {', '.join(parts)}."


def _skipped(line: StepLine) -> str:
    if not line.skipped:
        return ""
    return f" At the dotted line {line.skipped} more micro-batches are left out, which repeat the others."


def _step_table(line: StepLine) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    stride = max(len(line.events) // _ROWS, 1)
    shown = sorted({*range(0, len(line.events), stride), line.peak, len(line.events) - 1})
    starts = [part.start for part in line.parts]
    rows = []
    for index in shown:
        part = line.parts[max(bisect_right(starts, line.events[index]) - 1, 0)]
        each = line.bytes[index]
        name = f"{part.name}{' (the peak)' if index == line.peak else ''}"
        rows.append((str(line.events[index]), name, *map(bytes_shown, each), bytes_shown(sum(each))))
    columns = ("event", "moment", *(KIND_NAMES.get(kind, kind) for kind in line.kinds), "together")
    return columns, tuple(rows)
