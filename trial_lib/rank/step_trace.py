"""Traces some steps after the counted ones. Whatever fails here costs the trace, and nothing else."""

import contextlib
import functools
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zerotune.trial_lib.messages.measurement import STEP_PARTS, Measurement, TracedStep
from zerotune.trial_lib.rank.engine_watch import EngineWatch
from zerotune.trial_lib.rank.rank_consensus import total

# The parts of a traced window: each instant belongs to one part.
#
# On a CPU the thread that trains does everything, so its own functions decide. A GPU works beside the host. There the
# device's kernels decide, and the host's functions only when the device is idle. A transfer between devices counts only
# while no kernel computes.

# What the model does to train on it, with all its parts
_WHOLE = ("generation", "rewards")
# Of several functions that a thread is in, the first of these decides. A collective within an optimizer step is a wait.
_ON_HOST = (*_WHOLE, "disk", "gathering", "reducing", "exchanging", "data", "host_update", "update", "compute")
# Of several things that a device does, the first of these decides. Computation hides the rest.
_ON_DEVICE = (*_WHOLE, "compute", "update", "gathering", "reducing", "exchanging", "transfers")
# What the host does while the device is idle. In all its other functions it issues work.
_IDLE = (*_WHOLE, "disk", "data", "host_update")


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
    on_host = sorted((each for each in events if not each.on_device), key=_by_start)
    own = [each for each in on_host if each.thread == thread]
    # Autograd has a thread of its own for each GPU, in which DeepSpeed fetches parameters for the backward pass.
    passes = _Passes.of(on_host)
    spans = _Host(own, passes).spans()
    calls = {part: [each for each in own if each.name == f"{PREFIX}{part}"] for part in (*_WHOLE, "update")}
    calls["update"] += [each for each in own if each.name == f"{PREFIX}host_update"]
    issuers = {each.number: each for each in on_host if each.number}
    spans += filter(None, (_on_device(each, issuers, calls, passes) for each in events if each.on_device))
    return TracedWindow(tuple(spans), ends[0].end, ends[-1].start, len(ends) - 1)


def collective_part(name: str) -> str:
    """The part that waits for a collective, by the name of its operator or kernel."""
    lowered = name.lower()
    return next((part for word, part in _KINDS if word in lowered), "exchanging")


@dataclass(frozen=True)
class _Passes:
    """Where the program's own collectives can be: within a pass, and not while DeepSpeed fetches parameters."""

    forward: Sequence[TraceEvent]
    backward: Sequence[TraceEvent]
    fetches: Sequence[TraceEvent]

    @classmethod
    def of(cls, on_host: Sequence[TraceEvent]) -> "_Passes":
        names = ("compute.forward", "compute.backward", "gathering")
        return cls(*([each for each in on_host if each.name == PREFIX + name] for name in names))

    def part_of(self, collective: str, issuer: TraceEvent) -> str:
        part = collective_part(collective)
        # Gradients are summed after the forward pass. Within it ranks share activations, as in a tensor product.
        is_own = _is_within(issuer, self.forward) or (part == "gathering" and _is_within(issuer, self.backward))
        return "exchanging" if is_own and not _is_within(issuer, self.fetches) else part


class _Host:
    """The events of the thread that trains."""

    def __init__(self, events: Sequence[TraceEvent], passes: _Passes) -> None:
        self._events = events
        self._passes = passes
        self._collectives = [each for each in events if each.name.startswith(_COLLECTIVE)]
        self._starts = [each.start for each in self._collectives]
        self._reducing = [each for each in events if each.name == PREFIX + REDUCES]

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
            return self._passes.part_of(name, event)
        # Operators outside DeepSpeed's calls are the training's too, such as those of a loss.
        return "" if event.is_annotation else "compute"

    def _waits_for(self, event: TraceEvent) -> str:
        if _is_within(event, self._reducing):
            return "reducing"
        last = bisect_right(self._starts, event.start) - 1
        return "exchanging" if last < 0 else self._passes.part_of(self._collectives[last].name, self._collectives[last])


def _on_device(
    event: TraceEvent, issuers: dict[int, TraceEvent], calls: dict[str, list[TraceEvent]], passes: _Passes
) -> Span | None:
    if event.is_annotation:
        # The profiler repeats annotations on the device.
        return None
    issuer = issuers.get(event.issued_by)
    issued = next((part for part, scopes in calls.items() if issuer is not None and _is_within(issuer, scopes)), "")
    if issued in _WHOLE:
        part = issued
    elif event.name.startswith(_NCCL):
        part = collective_part(event.name) if issuer is None else passes.part_of(event.name, issuer)
    elif event.name.startswith(_COPIES):
        part = "transfers"
    else:
        part = issued or "compute"
    return Span(event.start, event.end, part, on_device=True)


def _is_within(event: TraceEvent, scopes: Sequence[TraceEvent]) -> bool:
    # Whether an event begins within one of some scopes, which are in order and do not overlap.
    place = bisect_right(scopes, event.start, key=_by_start) - 1
    return place >= 0 and event.start < scopes[place].end


def _by_start(event: TraceEvent) -> int:
    return event.start


# The trace of some steps

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
# What a trainer of reinforcement learning does beside training
_OF_LOOPS = (
    ("transformers.generation.utils", "GenerationMixin", "generate", "generation"),
    ("vllm", "LLM", "generate", "generation"),
    *(
        (f"trl.trainer.{name.lower()}_trainer", f"{name}Trainer", "_calculate_rewards", "rewards")
        for name in ("GRPO", "RLOO")
    ),
)
_CALLS = {"forward": "compute.forward", "backward": "compute.backward"}


@contextlib.contextmanager
def named_scopes(watch: EngineWatch) -> Iterator[None]:
    """Names the parts of an engine's steps in the trace. Everything is put back at the end."""
    # DeepSpeed ignores offloading at some stages.
    offloads = any(getattr(watch.engine.optimizer, name, False) for name in ("cpu_offload", "offload_optimizer"))
    step = "host_update" if offloads else "update"
    with contextlib.ExitStack() as undo:
        for module, owner, name, scope in (*_FUNCTIONS, *_OF_LOOPS):
            # What is not loaded is not used.
            with contextlib.suppress(AttributeError):
                _name(undo, getattr(sys.modules.get(module), owner), name, scope)
        if torch.distributed.is_available():
            _name(undo, torch.distributed.Work, "wait", WAIT)
        watch.parts.scope = lambda part: record_function(PREFIX + _CALLS.get(part, step))
        undo.callback(setattr, watch.parts, "scope", None)
        yield


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


def with_data_over(measurement: Measurement) -> Measurement:
    """The measurement of a program that has ended before the steps that would have been traced."""
    return replace(measurement, traced=TracedStep(failure=_DATA_OVER))


class TracedEnd:
    """Traces steps after the counted ones, whose seconds are agreed on. Every rank makes one after the same step."""

    def __init__(
        self,
        watch: EngineWatch,
        measurement: Measurement,
        seconds: Sequence[float],
        keep: Callable[[Measurement], None],  # with a measurement that counts if the rank gets no further
    ) -> None:
        self._watch = watch
        self._measurement = measurement
        self._keep = keep
        self._step_s = statistics.median(seconds)
        self._trace: StepTrace | None = None

    def go_on(self) -> Measurement | None:
        """The measurement with its trace; None if the code has to train on.

        Called after the last counted, and each later step.
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

    def cut_short(self) -> Measurement:
        """The measurement if the program ends during the trace."""
        if self._trace is not None:
            self._trace.close()
        return with_data_over(self._measurement)

    def _with(self, traced: TracedStep) -> Measurement:
        return replace(self._measurement, traced=traced)
