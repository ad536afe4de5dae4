"""Traces some steps after the counted ones. Whatever fails here costs the trace, and nothing else."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

from trial_lib.measure.engine_watch import EngineWatch
from trial_lib.measure.trace.events import BOUNDARY, PREFIX, TraceEvent, window_of
from trial_lib.measure.trace.parts import parts_of
from trial_lib.measure.trace.scopes import named_scopes
from trial_lib.wire.traced_step import STEP_PARTS, TracedStep

_Found = TypeVar("_Found")

# The traced steps take about so long together, and at least one step is traced.
_SECONDS, _MOST_STEPS = 0.5, 5
# The profiler keeps every operator of a step in memory.
_LONGEST_STEP_S = 30.0
# The first step under the profiler also prepares it. A long step hides that.
_SHORT_STEP_S = 0.5


def untraced(step_s: float) -> str:
    """Returns why steps of so many seconds are not traced; empty if they are."""
    if step_s <= _LONGEST_STEP_S:
        return ""
    return f"A step takes {step_s:.0f} s, and the trace of more than {_LONGEST_STEP_S:.0f} s may not fit into memory."


class StepTrace:
    """Traces the next steps of an engine. Every rank makes one after the same step.

    Args:
        watch: of the engine that trains.
        step_s: seconds of a step, which all ranks have agreed on.
        total: returns the sum of each value over all ranks; each of them calls it.
    """

    def __init__(self, watch: EngineWatch, step_s: float, total: Callable[[list[float]], list[float]]) -> None:
        self._watch = watch
        self._total = total
        self._began = time.monotonic()
        self._left_out = 1 if step_s < _SHORT_STEP_S else 0
        self._steps = max(1, min(_MOST_STEPS, int(_SECONDS / max(step_s, 1e-9))))
        self._left = self._left_out + self._steps
        self._failure = ""
        self._open = contextlib.ExitStack()
        self._profile: Any = None
        self._without_loss(self._begin)

    def step_ended(self) -> TracedStep | None:
        """Returns the traced step when all ranks have it; None if the code has to train on."""
        self._left -= 1
        self._without_loss(self._mark)
        if self._left > 0:
            return None
        parts = self._without_loss(self._parts)
        self.close()
        return self._agreed(parts or {})

    def close(self) -> None:
        """Puts back everything that the trace has replaced."""
        self._open.close()
        if self._profile is not None:
            with contextlib.suppress(Exception):
                self._profile.stop()
            self._profile = None

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._watch.device.kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # The profiler takes memory, too. What the program needs at most has been measured before.
        self._watch.device.unlimit()
        self._open.enter_context(named_scopes(self._watch))
        traced = profile(activities=activities)
        traced.start()
        self._profile = traced
        self._mark()

    def _mark(self) -> None:
        if self._left in (0, self._steps):
            # The counted time begins and ends with an idle device.
            self._watch.device.finish()
        with record_function(PREFIX + BOUNDARY):
            pass

    def _parts(self) -> dict[str, float]:
        """Returns the seconds of a step by part."""
        traced, self._profile = self._profile, None
        traced.stop()
        events = [_plain(each) for each in traced.profiler.kineto_results.events()]
        window = window_of(events, self._left_out)
        found = parts_of(window.spans, window.start, window.end)
        return {part: seconds / window.steps for part, seconds in found.items()}

    def _agreed(self, parts: dict[str, float]) -> TracedStep:
        """Returns the mean over all ranks. One rank without a trace leaves all without."""
        *sums, failed, ranks = self._total([*(parts.get(part, 0.0) for part in STEP_PARTS), float(not parts), 1.0])
        spent = time.monotonic() - self._began
        if failed:
            reason = self._failure or "The steps of another rank could not be traced."
            return TracedStep(spent=spent, failure=reason)
        means = {part: seconds / ranks for part, seconds in zip(STEP_PARTS, sums, strict=True)}
        return TracedStep(seconds=sum(means.values()), parts=means, steps=self._steps, spent=spent)

    def _without_loss(self, function: Callable[[], _Found]) -> _Found | None:
        """Calls a function, unless one has failed before. The measurement is complete without a trace."""
        if self._failure:
            return None
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - whatever the profiler raises is no fault of the program
            self._failure = f"The steps could not be traced: {type(error).__name__}: {error}"
            return None


def _plain(event: Any) -> TraceEvent:
    start = event.start_ns()
    return TraceEvent(
        name=event.name(),
        start=start,
        end=start + event.duration_ns(),
        thread=event.start_thread_id(),
        on_device=event.device_type().name != "CPU",
        is_annotation=event.is_user_annotation(),
        number=event.correlation_id(),
        issued_by=event.linked_correlation_id(),
    )
