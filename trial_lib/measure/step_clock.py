"""Seconds of an optimizer step: of wall clock and of processor time, with pauses left out."""

import time

import torch


class StepClock:
    """Runs from one `mark` to the next."""

    def __init__(self) -> None:
        self._started: tuple[float, ...] = (0.0, 0.0)
        self._paused: tuple[float, ...] | None = None

    def mark(self) -> None:
        """Starts the time of the next step."""
        self._started = _now()
        if self._paused is not None:
            self._paused = self._started

    def elapsed(self) -> tuple[float, ...]:
        """Returns the seconds of wall clock and of processor time since `mark`."""
        now = _now() if self._paused is None else self._paused
        return tuple(end - start for start, end in zip(self._started, now, strict=True))

    def pause(self) -> None:
        """Leaves out what follows, until `resume`."""
        if self._paused is None:
            self._paused = _now()

    def resume(self) -> None:
        """Goes on counting after `pause`; harmless where nothing is paused."""
        if self._paused is None:
            return
        self._started = tuple(
            start + end - pause for start, end, pause in zip(self._started, _now(), self._paused, strict=True)
        )
        self._paused = None


def _now() -> tuple[float, ...]:
    """Returns the two clocks, when the device has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()
