"""The memory of one optimizer step, drawn: what is alive when, by kind."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun
from zerotune.trial_lib.plan.answer import MOMENT_WORDS
from zerotune.trial_lib.plan.device_memory import rounded
from zerotune.trial_lib.plan.plan_record import PlannedDevices
from zerotune.trial_lib.records.units import bytes_shown
from zerotune.trial_lib.report.chart import (
    DASHED,
    GREY,
    RED,
    Area,
    Axis,
    Band,
    Chart,
    Drawn,
    Level,
    Points,
    Remark,
)
from zerotune.trial_lib.report.plan_figures import (
    BLUE,
    FAR,
    KIND_COLOURS,
    KIND_NAMES,
    MOMENT_NAMES,
    OCHRE,
    OLIVE,
    VIOLET,
    bytes_range,
    bytes_unit,
    device_level,
    devices_key,
    devices_name,
)

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
    return Drawn(f"line-{devices_key(devices)}", title, says + _skipped(line), figure, *_table(line))


def host_figure(devices: PlannedDevices, line: StepLine) -> Drawn:
    unit = bytes_unit(line.most)
    figure = _drawn(line, *unit)
    says = (
        f"What one rank keeps in its host's memory during the same step. {_peak_sentence(line)} Each rank of the host "
        "keeps its own."
    )
    title = f"Host memory of that step on {devices_name(devices)}"
    return Drawn(f"host-{devices_key(devices)}", title, says + _skipped(line), figure, *_table(line))


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


def _table(line: StepLine) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
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
