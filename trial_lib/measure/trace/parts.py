"""The parts of a traced window: each instant belongs to one part. Pure.

On a CPU the thread that trains does everything, so its own functions decide. A GPU works beside the host. There the
device's kernels decide, and the host's functions only when the device is idle. A transfer between devices counts only
while no kernel computes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trial_lib.wire.traced_step import STEP_PARTS

# Of several functions that a thread is in, the first of these decides. A collective within an optimizer step is a wait.
_ON_HOST = ("disk", "gathering", "reducing", "exchanging", "data", "host_update", "update", "compute")
# Of several things that a device does, the first of these decides. Computation hides the rest.
_ON_DEVICE = ("compute", "update", "gathering", "reducing", "exchanging", "transfers")
# What the host does while the device is idle. In all its other functions it issues work.
_IDLE = ("disk", "data", "host_update")


@dataclass(frozen=True)
class Span:
    """A stretch of time in which one part goes on.

    Attributes:
        start: nanoseconds.
        end: nanoseconds.
        part: one of `STEP_PARTS`.
        on_device: whether a device beside the host does it.
    """

    start: int
    end: int
    part: str
    on_device: bool = False


def parts_of(spans: Iterable[Span], start: int, end: int) -> dict[str, float]:
    """Returns the seconds of each part from `start` to `end`, which add up to that time.

    Args:
        spans: in any order. They may overlap. Without any on a device, the host is the device.
        start: nanoseconds.
        end: nanoseconds.
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
    """Returns what decides first: where, on which span, and the part that it counts as."""
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
