"""Seconds of an optimizer step: by the device's clock and of processor time.

A training runs ahead of its device. While the device works on a step, the program loads the next batch and queues more
work. So nothing may wait for the device between two steps. Times are marked in the device's own queue. They are read
later, when the ranks decide something and the device is idle anyway.
"""

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from trial_lib.rank.device import Device

PARTS = ("forward", "backward", "step")


@dataclass(frozen=True)
class _Moment:
    """The clocks of the device and the processor at one moment."""

    instant: Any
    cpu_s: float


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer step, which can be read when the device has done it."""

    device: Device
    span: tuple[_Moment, _Moment]
    parts: dict[str, list[tuple[Any, Any]]]

    def seconds(self) -> dict[str, float]:
        """By the device's clock (`latency`), of processor time (`cpu`), and of each part."""
        between, (start, end) = self.device.seconds_between, self.span
        parts = {part: sum(between(*call) for call in calls) for part, calls in self.parts.items()}
        return {"latency": between(start.instant, end.instant), "cpu": end.cpu_s - start.cpu_s, **parts}


class StepClock:
    """Runs from one `mark` to the next `step_ended`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.mark()

    def mark(self) -> None:
        self._started = self._now()

    def step_ended(self, parts: dict[str, list[tuple[Any, Any]]]) -> StepTime:
        return StepTime(self._device, (self._started, self._now()), parts)

    def _now(self) -> _Moment:
        return _Moment(self._device.instant(), time.process_time())


class PartTimer:
    """Records when each part of an optimizer step begins and ends."""

    def __init__(self, device: Device) -> None:
        # a context that names a call of a part in a trace; None if nothing is traced
        self.scope: Callable[[str], AbstractContextManager[Any]] | None = None
        self._device = device
        self._calls: dict[str, list[tuple[Any, Any]]] = {part: [] for part in PARTS}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with each call recorded as one of `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._device.is_recording():
                return function(*args, **kwargs)
            start = self._device.instant()
            try:
                with contextlib.nullcontext() if self.scope is None else self.scope(part):
                    return function(*args, **kwargs)
            finally:
                self._calls[part].append((start, self._device.instant()))

        return call

    def take(self) -> dict[str, list[tuple[Any, Any]]]:
        """The calls of each part since the last call of this method."""
        calls, self._calls = self._calls, {part: [] for part in PARTS}
        return calls
