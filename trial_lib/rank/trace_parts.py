"""The parts of a traced window: each instant belongs to one part. Pure.

On a CPU the thread that trains does everything, so its own functions decide. A GPU works beside the host. There the
device's kernels decide, and the host's functions only when the device is idle. A transfer between devices counts only
while no kernel computes.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trial_lib.messages.measurement import STEP_PARTS

# Of several functions that a thread is in, the first of these decides. A collective within an optimizer step is a wait.
_ON_HOST = ("disk", "gathering", "reducing", "exchanging", "data", "host_update", "update", "compute")
# Of several things that a device does, the first of these decides. Computation hides the rest.
_ON_DEVICE = ("compute", "update", "gathering", "reducing", "exchanging", "transfers")
# What the host does while the device is idle. In all its other functions it issues work.
_IDLE = ("disk", "data", "host_update")


@dataclass(frozen=True)
class Span:
    """A stretch of time in which one part goes on."""

    start: int  # nanoseconds
    end: int  # nanoseconds
    part: str  # one of `STEP_PARTS`
    on_device: bool = False  # whether a device beside the host does it


def parts_of(spans: Iterable[Span], start: int, end: int) -> dict[str, float]:
    """Seconds of each part, which add up to the time from `start` to `end` (ns).

    The spans come in any order, and may overlap. Without any on a device, the host is the device.
    """
    within = [
        Span(max(each.start, start), min(each.end, end), each.part, each.on_device)
        for each in spans
        if each.end > start and each.start < end and each.end > each.start
    ]
    layers = _layers(any(each.on_device for each in within))
    places = {layer[:2]: place for place, layer in enumerate(layers)}
    changes: list[tuple[int, int, int]] = []
    for each in within:
        place = places[each.on_device, each.part]
        changes += [(each.start, 1, place), (each.end, -1, place)]
    changes.sort()
    seconds = dict.fromkeys(STEP_PARTS, 0)
    open_spans, before = [0] * len(layers), start
    for moment, change, place in changes:
        if moment > before:
            seconds[_first(open_spans, layers)] += moment - before
            before = moment
        open_spans[place] += change
    seconds["other"] += end - before
    return {part: nanoseconds / 1e9 for part, nanoseconds in seconds.items()}


def _layers(has_device: bool) -> list[tuple[bool, str, str]]:
    if not has_device:
        return [(False, part, part) for part in _ON_HOST]
    issued = [part for part in _ON_HOST if part not in _IDLE]
    return [
        *((True, part, part) for part in _ON_DEVICE),
        *((False, part, part) for part in _IDLE),
        *((False, part, "launches") for part in issued),
    ]


def _first(open_spans: Sequence[int], layers: Sequence[tuple[bool, str, str]]) -> str:
    return next((layers[place][2] for place, count in enumerate(open_spans) if count), "other")


# Spans of the events of torch's profiler

# The names of annotations that `named_scopes` makes begin so. A part follows, or one of the names below.
PREFIX = "zerotune::"
# A wait for a collective; the end of an optimizer step; a function that reduces and waits for that.
WAIT, BOUNDARY, REDUCES = "wait", "boundary", "reduces"
_LOADER = "enumerate(DataLoader)"
_COLLECTIVE, _NCCL, _COPIES = "c10d::", "nccl", ("Memcpy HtoD", "Memcpy DtoH")
# Parts of names of collectives, in this order: a reduce_scatter reduces.
_KINDS = (("reduce", "reducing"), ("gather", "gathering"), ("broadcast", "gathering"), ("scatter", "gathering"))


@dataclass(frozen=True)
class TraceEvent:
    """One event of the profiler."""

    name: str  # as the profiler has it
    start: int  # nanoseconds
    end: int  # nanoseconds
    thread: int = 0  # that it was in
    on_device: bool = False  # whether a device beside the host did it
    is_annotation: bool = False  # whether code has named it by `record_function`
    number: int = 0  # by which a device's event names the operator that issued it; 0 for none
    issued_by: int = 0  # that number, of a device's event


@dataclass(frozen=True)
class TracedWindow:
    """The spans between the first and the last end of a step."""

    spans: tuple[Span, ...]  # of the thread that trains, and of the device
    start: int  # nanoseconds
    end: int  # nanoseconds
    steps: int  # between the two


def window_of(events: Sequence[TraceEvent], left_out: int) -> TracedWindow:
    """The spans of one rank's trace, without its first steps. ValueError if the trace has no step."""
    ends = sorted((each for each in events if each.name == PREFIX + BOUNDARY), key=lambda each: each.start)[left_out:]
    if len(ends) < 2:
        raise ValueError("the trace has no complete step")
    thread = ends[-1].thread
    own = sorted((each for each in events if not each.on_device and each.thread == thread), key=_by_start)
    spans = _Host(own).spans()
    updates = [each for each in own if each.name in (f"{PREFIX}update", f"{PREFIX}host_update")]
    issuers = {each.number: each for each in events if not each.on_device and each.number}
    spans += [span for each in events if each.on_device if (span := _on_device(each, issuers, updates)) is not None]
    return TracedWindow(tuple(spans), ends[0].end, ends[-1].start, len(ends) - 1)


def collective_part(name: str) -> str:
    """The part that waits for a collective, by the name of its operator or kernel."""
    lowered = name.lower()
    return next((part for word, part in _KINDS if word in lowered), "exchanging")


class _Host:
    """The events of the thread that trains."""

    def __init__(self, events: Sequence[TraceEvent]) -> None:
        self._events = events
        self._collectives = [each for each in events if each.name.startswith(_COLLECTIVE)]
        self._starts = [each.start for each in self._collectives]
        self._reducing = [each for each in events if each.name == PREFIX + REDUCES]
        self._forward = [each for each in events if each.name == f"{PREFIX}compute.forward"]

    def spans(self) -> list[Span]:
        found, computed_until = [], 0
        for each in self._events:
            part = self._part(each)
            if part == "compute":
                # Operators call operators.
                if each.end <= computed_until:
                    continue
                computed_until = each.end
            if part:
                found.append(Span(each.start, each.end, part))
        return found

    def _part(self, event: TraceEvent) -> str:
        name = event.name
        if name.startswith(PREFIX):
            named = name.removeprefix(PREFIX).partition(".")[0]
            if named == WAIT:
                return self._waits_for(event)
            return "" if named in (BOUNDARY, REDUCES) else named
        if name.startswith(_LOADER):
            return "data"
        if name.startswith(_COLLECTIVE):
            return self._of_collective(event)
        # Operators outside DeepSpeed's calls are the training's too, such as those of a loss.
        return "" if event.is_annotation else "compute"

    def _waits_for(self, event: TraceEvent) -> str:
        if _is_within(event, self._reducing):
            return "reducing"
        last = bisect_right(self._starts, event.start) - 1
        return "exchanging" if last < 0 else self._of_collective(self._collectives[last])

    def _of_collective(self, event: TraceEvent) -> str:
        part = collective_part(event.name)
        # Gradients are summed after the forward pass. Within it, ranks share a tensor product.
        return "exchanging" if part == "reducing" and _is_within(event, self._forward) else part


def _on_device(event: TraceEvent, issuers: dict[int, TraceEvent], updates: Sequence[TraceEvent]) -> Span | None:
    if event.is_annotation:
        # The profiler repeats annotations on the device.
        return None
    if event.name.startswith(_NCCL):
        part = collective_part(event.name)
    elif event.name.startswith(_COPIES):
        part = "transfers"
    else:
        issuer = issuers.get(event.issued_by)
        part = "update" if issuer is not None and _is_within(issuer, updates) else "compute"
    return Span(event.start, event.end, part, on_device=True)


def _is_within(event: TraceEvent, scopes: Sequence[TraceEvent]) -> bool:
    # Whether an event begins within one of some scopes, which are in order and do not overlap.
    place = bisect_right(scopes, event.start, key=_by_start) - 1
    return place >= 0 and event.start < scopes[place].end


def _by_start(event: TraceEvent) -> int:
    return event.start
