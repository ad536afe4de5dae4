"""Traces some steps after the counted ones. Whatever fails here costs the trace, and nothing else."""

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trial_lib.messages.measurement import STEP_PARTS, TracedStep
from trial_lib.rank.engine_watch import EngineWatch
from trial_lib.rank.meeting import total
from trial_lib.rank.trace_parts import BOUNDARY, PREFIX, REDUCES, WAIT, TraceEvent, parts_of, window_of

_SWAPS, _ZERO = "deepspeed.runtime.swap_tensor", "deepspeed.runtime.zero"
_STAGE3 = "DeepSpeedZeroOptimizer_Stage3"
_OF_STATES = ("swap_in_optimizer_state", "swap_out_optimizer_state")
# Functions of DeepSpeed 0.16 to 0.19 that wait for collectives or for drives, with their names in the trace. Of
# asynchronous collectives the profiler shows the beginning only.
_FUNCTIONS = (
    (f"{_ZERO}.partitioned_param_coordinator", "PartitionedParameterCoordinator", "fetch_sub_module", "gathering"),
    (f"{_ZERO}.stage3", _STAGE3, f"_{_STAGE3}__reduce_and_partition_ipg_grads", REDUCES),
    *(
        (f"{_SWAPS}.{module}", owner, name, "disk")
        for module, owner, names in (
            (
                "partitioned_param_swapper",
                "AsyncPartitionedParameterSwapper",
                ("synchronize_reads", "synchronize_writes", "swap_out_partitioned_params"),
            ),
            ("partitioned_optimizer_swapper", "PartitionedOptimizerSwapper", _OF_STATES),
            ("pipelined_optimizer_swapper", "PipelinedOptimizerSwapper", _OF_STATES),
        )
        for name in names
    ),
)
_CALLS = {"forward": "compute.forward", "backward": "compute.backward"}


@contextlib.contextmanager
def named_scopes(watch: EngineWatch) -> Iterator[None]:
    """Names the parts of an engine's steps in the trace. Everything is put back at the end."""
    step = "host_update" if updates_on_host(watch.engine) else "update"
    with contextlib.ExitStack() as undo:
        for module, owner, name, scope in _FUNCTIONS:
            # What is not loaded is not used.
            with contextlib.suppress(AttributeError):
                _name(undo, getattr(sys.modules.get(module), owner), name, scope)
        if torch.distributed.is_available():
            _name(undo, torch.distributed.Work, "wait", WAIT)
        watch.parts.scope = lambda part: record_function(PREFIX + _CALLS.get(part, step))
        undo.callback(setattr, watch.parts, "scope", None)
        yield


def updates_on_host(engine: Any) -> bool:
    """Whether an engine's optimizer is offloaded, which DeepSpeed ignores at some stages."""
    optimizer = engine.optimizer
    return any(bool(getattr(optimizer, name, False)) for name in ("cpu_offload", "offload_optimizer"))


def _name(undo: contextlib.ExitStack, owner: Any, name: str, scope: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + scope):
            return function(*args, **kwargs)

    setattr(owner, name, named)
    undo.callback(setattr, owner, name, function)


_Found = TypeVar("_Found")

# The traced steps take about so long together, and at least one step is traced.
_SECONDS, _MOST_STEPS = 0.5, 5
# The profiler keeps every operator of a step in memory.
_LONGEST_STEP_S = 30.0
# The first step under the profiler also prepares it. A long step hides that.
_SHORT_STEP_S = 0.5


class StepTrace:
    """Traces the next steps of an engine. Every rank makes one after the same step, with `step_s` agreed on."""

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
        """The traced step when all ranks have it; None if the code has to train on."""
        self._left -= 1
        self._without_loss(self._mark)
        if self._left > 0:
            return None
        parts = self._without_loss(self._parts)
        self.close()
        return self._agreed(parts or {})

    def close(self) -> None:
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
        # The seconds of a step by part.
        traced, self._profile = self._profile, None
        traced.stop()
        events = [_plain(each) for each in traced.profiler.kineto_results.events()]
        window = window_of(events, self._left_out)
        found = parts_of(window.spans, window.start, window.end)
        return {part: seconds / window.steps for part, seconds in found.items()}

    def _agreed(self, parts: dict[str, float]) -> TracedStep:
        # The mean over all ranks. One rank without a trace leaves all without.
        *sums, failed, ranks = self._total([*(parts.get(part, 0.0) for part in STEP_PARTS), float(not parts), 1.0])
        spent = time.monotonic() - self._began
        if failed:
            reason = self._failure or "The steps of another rank could not be traced."
            return TracedStep(spent=spent, failure=reason)
        means = {part: seconds / ranks for part, seconds in zip(STEP_PARTS, sums, strict=True)}
        return TracedStep(seconds=sum(means.values()), parts=means, steps=self._steps, spent=spent)

    def _without_loss(self, function: Callable[[], _Found]) -> _Found | None:
        # Calls a function, unless one has failed before. The measurement is complete without a trace.
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


# The end of a trial whose measurement is complete, and gets the trace

_CUT_SHORT = "The rank ended while its steps were traced."
_DATA_OVER = "The program ended before enough steps could be traced."


def with_data_over(measurement: dict[str, Any]) -> dict[str, Any]:
    """The measurement of a program that has ended before the steps that would have been traced."""
    return {**measurement, "traced": TracedStep(failure=_DATA_OVER).to_json()}


class TracedEnd:
    """Traces steps after the counted ones, whose seconds are agreed on. Every rank makes one after the same step."""

    def __init__(
        self,
        watch: EngineWatch,
        measurement: dict[str, Any],
        seconds: Sequence[float],
        keep: Callable[[dict[str, Any]], None],  # with a measurement that counts if the rank gets no further
    ) -> None:
        self._watch = watch
        self._measurement = measurement
        self._keep = keep
        self._step_s = statistics.median(seconds)
        self._trace: StepTrace | None = None

    def go_on(self) -> dict[str, Any] | None:
        """The measurement with its trace; None if the code has to train on.

        Call it first after the last counted step, and then after each step.
        """
        if self._trace is not None:
            traced = self._trace.step_ended()
            return None if traced is None else self._with(traced)
        if self._step_s > _LONGEST_STEP_S:
            longest = f"the trace of more than {_LONGEST_STEP_S:.0f} s may not fit into memory"
            return self._with(TracedStep(failure=f"A step takes {self._step_s:.0f} s, and {longest}."))
        self._keep(self._with(TracedStep(failure=_CUT_SHORT)))
        self._trace = StepTrace(self._watch, self._step_s, lambda values: total(values, self._watch.engine))
        return None

    def cut_short(self) -> dict[str, Any]:
        """The measurement if the program ends during the trace."""
        if self._trace is not None:
            self._trace.close()
        return with_data_over(self._measurement)

    def _with(self, traced: TracedStep) -> dict[str, Any]:
        return {**self._measurement, "traced": traced.to_json()}
