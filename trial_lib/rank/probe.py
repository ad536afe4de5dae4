"""The probe replaces `deepspeed.initialize`, measures the engine, and ends the rank when it has enough.

The user's code stays as it is. If an engine trains, the candidate's overrides are merged into the configuration that
the code passes. The probe measures the first such engine.
"""

import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from zerotune.trial_lib.messages.measurement import TRACE, Arrival, Measurement
from zerotune.trial_lib.messages.orders import SizeOrder, StepWindow
from zerotune.trial_lib.messages.statistics import t_quantile
from zerotune.trial_lib.rank import device as expected
from zerotune.trial_lib.rank import interception
from zerotune.trial_lib.rank.batch_source import BatchSource
from zerotune.trial_lib.rank.counted_steps import CountedStep, CountedSteps, model_profile
from zerotune.trial_lib.rank.device import Device, UnknownDeviceError, device_of
from zerotune.trial_lib.rank.engine_watch import EngineWatch, PipelineWatch, refuse_other_replicas
from zerotune.trial_lib.rank.first_steps import FirstSteps
from zerotune.trial_lib.rank.interception import InitializeObserver, intercept
from zerotune.trial_lib.rank.loader_batches import loader_batches
from zerotune.trial_lib.rank.memory import RankMemory, in_force
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.rank_consensus import most
from zerotune.trial_lib.rank.step_trace import TracedEnd, with_data_over
from zerotune.trial_lib.rank.surveys import StretchedWarmUp, Surveys
from zerotune.trial_lib.rank.tensor_parallel import refuse_unequal_batches
from zerotune.trial_lib.rank.torch_functions import NewCompilations, PlainSteps


class CurrentProbe:
    """Forwards each event to the current probe."""

    def __init__(self, find: Callable[[], InitializeObserver | None]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        probe = self._find()
        assert probe is not None
        return getattr(probe, name)


# When enough optimizer steps have been measured

# The smallest and the largest growth of the number of steps from one moment to the next.
_LEAST_GROWTH, _MOST_GROWTH = 1.1, 1.5


def next_moment(window: StepWindow, step_times: Sequence[float]) -> int:
    """The number of counted steps after which the ranks next decide whether the steps are enough.

    It is the expected end of the measurement, by the times of the slowest rank in seconds, the same on every rank: all
    have to reach the same moment. Agreement costs time, so at least a tenth more steps come first. The first few steps
    predict the next ones badly, so at most half as many again come first.
    """
    counted = len(step_times)
    if counted < window.min_steps:
        return min(window.min_steps, window.max_steps)
    for_seconds = window.max_seconds / statistics.fmean(step_times)
    # If the error has to be 0, no measured error is small enough.
    needed = relative_standard_error(step_times) / window.relative_error if window.relative_error else math.inf
    for_error = counted * needed**2
    expected = max(_LEAST_GROWTH * counted, min(for_seconds, for_error, _MOST_GROWTH * counted))
    return min(math.ceil(expected), window.max_steps)


def is_enough(window: StepWindow, step_times: Sequence[float]) -> bool:
    """Whether these counted step times (s, of the slowest rank) are enough."""
    return (
        len(step_times) >= window.max_steps
        or sum(step_times) >= window.max_seconds
        or relative_standard_error(step_times) <= window.relative_error
    )


def relative_standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean, divided by the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


# Whether a running trial can still reach the best, by a bound from its first counted steps

# The largest share of trials that could reach the best and are stopped all the same, over all looks together.
ERROR_RATE = 0.01
# Step times repeat only within some percent. If three steps scatter less by chance, this value replaces their scatter.
_LEAST_SPREAD = 0.05
# Two steps are little evidence. A third costs little, unless a step takes this long (s).
_LONG_STEP = 5.0
_LEAST_STEPS, _LEAST_SHORT_STEPS = 2, 3


def looks_after(window: StepWindow, counted: int) -> bool:
    """Whether the ranks look at a trial with something to beat after this many counted steps.

    Each look, an agreement of the ranks, comes after half as many steps again as the last one. A full window has
    moments of its own.
    """
    moment = _LEAST_STEPS
    while moment < min(counted, window.min_steps):
        moment = math.ceil(moment * 1.5)
    return moment == counted <= window.min_steps


def throughput_bound(step_times: Sequence[float], samples_per_step: float) -> float:
    """The largest possible throughput (samples/s over all ranks) by these steps (s, slowest rank), at the error rate.

    It is infinite for too few steps. Otherwise it is a one-sided Student bound on the mean logarithm of the step time,
    because step times scatter by factors. The k-th look spends the share 1/(k (k + 1)) of the error rate. These shares
    add up to the whole.
    """
    count = len(step_times)
    # The first step alone decides, so that the later looks are fixed before their steps are seen.
    is_long = count > 0 and step_times[0] > _LONG_STEP
    look = count - (_LEAST_STEPS if is_long else _LEAST_SHORT_STEPS) + 1
    if look < 1:
        return math.inf
    logarithms = [math.log(seconds) for seconds in step_times]
    spread = max(statistics.stdev(logarithms), _LEAST_SPREAD)
    quantile = t_quantile(1 - ERROR_RATE / (look * (look + 1)), count - 1)
    return samples_per_step / math.exp(statistics.fmean(logarithms) - quantile * spread / math.sqrt(count))


def is_hopeless(step_times: Sequence[float], samples_per_step: float, to_beat: float) -> bool:
    """Whether a trial can no longer reach the best throughput (samples/s over all ranks)."""
    return throughput_bound(step_times, samples_per_step) < to_beat


def too_slow_reason(step_times: Sequence[float], samples_per_step: float, to_beat: float) -> str:
    """The sentence for a trial that `is_hopeless`."""
    most = throughput_bound(step_times, samples_per_step)
    return (
        f"After {len(step_times)} counted steps it trains at most {most:.3g} samples/s ({1 - ERROR_RATE:.0%} sure). "
        f"The best has {to_beat:.3g}."
    )


# Whether an engine trains at all

NOT_FINITE = "The loss was not finite. A smaller learning rate or fp32 may help."
# Dynamic loss scaling halves its scale some dozen times before it fits. More skipped steps are no search for a scale.
_MOST_IN_A_ROW = 100


class SkippedInARow:
    """Counts the optimizer steps in a row that DeepSpeed has skipped, because their gradients are not finite."""

    def __init__(self) -> None:
        self._count = 0

    def reason_after(self, applied: bool, loss: torch.Tensor | None) -> str:
        """Counts a step, and returns why the training has diverged; empty if it may go on."""
        self._count = 0 if applied else self._count + 1
        if applied:
            return ""
        if loss is not None and not bool(torch.isfinite(loss).all()):
            return NOT_FINITE
        if self._count < _MOST_IN_A_ROW:
            return ""
        skipped = f"{_MOST_IN_A_ROW} optimizer steps in a row were skipped"
        return f"{skipped}, because their gradients were not finite."


class Session(Protocol):
    """The receiver of a probe's events: what measures one size after another in this rank."""

    phases: dict[str, float]  # seconds of the rank's phases so far; the probe adds its own

    def engine_built(self) -> None: ...  # the first engine that trains exists
    def training_began(self) -> None: ...  # after the first optimizer step of the measured engine
    def keep(self, measurement: Measurement) -> None: ...  # a measurement that counts if the rank gets no further
    # With a measurement that is enough; ends the rank or raises `NextSize`; called again without one if the code still
    # trains on, or destroys the process group
    def finished(self, measurement: Measurement | None) -> None: ...
    def end_early(self) -> None: ...  # before the code destroys the group, if enough may have been measured
    def leave(self) -> None: ...  # before the end of a program that cannot be run again in this process
    def fail(self, error: BaseException) -> None: ...  # records the exception, and ends the process


current: "Probe | None" = None  # the probe of this process; None if the process is no rank of a trial


class Probe:
    """Measures the first engine of a rank that trains. DeepSpeed's replacements read `order.overrides` itself."""

    def __init__(
        self,
        order: SizeOrder,
        source: BatchSource,  # has the place of the program's batch size, for a refusal
        facts: ProgramFacts,
        session: Session,
    ) -> None:
        self.facts = facts
        self.has_finished = self.has_frozen_engine = self._keeps_engine = False
        self.thread = threading.main_thread()  # that trains; before, the one that has built its engine, or the main one
        self._order = order
        self._source = source
        self._session = session
        self._phases = session.phases
        # A child that the program forks has a copy of this object, but is not the rank.
        self._process = os.getpid()
        self._watch: EngineWatch | None = None
        self.steps_seen, self._skipped = 0, SkippedInARow()
        self._plain_steps = PlainSteps(self.refuse)
        self._arrived: tuple[int, int | None] | None = None
        self._counted, self._compilations = CountedSteps(), NewCompilations()
        self.memory, self._first_steps = RankMemory(), FirstSteps(order.weighs)
        self._phase_started = time.monotonic()
        self._warm_up = StretchedWarmUp(order.longest_sequence, order.window.start_step - 1)
        self._survey: Surveys | None = None
        self._traced: TracedEnd | None = None

    @property
    def has_engine(self) -> bool:
        return self._watch is not None

    @property
    def _watched(self) -> EngineWatch:
        assert self._watch is not None
        return self._watch

    @property
    def device(self) -> Device | None:
        return None if self._watch is None else self._watch.device

    def install(self) -> None:
        global current
        if current is None:
            latest: Any = CurrentProbe(lambda: current)
            intercept(self._order.overrides, self.facts, latest, self._order.turned)
            loader_batches.install()
        current = self
        self._plain_steps.begin()

    def take_over(self, previous: "Probe") -> None:
        """Measures another probe's engine, in place of `install`.

        Memory counts from its initialisation, as in fresh ranks.
        """
        global current
        current = self
        assert previous._watch is not None
        self._watch, self.thread = previous._watch, previous.thread
        self._watch.start_over(int(self._order.overrides.get(MICRO_BATCH, previous._watch.asked)), self)
        self.memory = previous.memory.taken_over()
        self._keeps_engine = True
        # An engine that has trained before has no first steps.
        self._first_steps = FirstSteps()
        self._begin_warm_up()
        self._session.engine_built()
        self._watch.clock.mark()

    def release_engine(self) -> Any:
        """Returns the measured engine, and drops all references to it."""
        watch, self._watch = self._watched, None
        watch.end()
        self._counted, self._first_steps = CountedSteps(), FirstSteps()
        return watch.engine

    @property
    def is_pipeline(self) -> bool:
        """Its buffers are made for one micro-batch size."""
        return isinstance(self._watch, PipelineWatch)

    def _finish(self, measurement: Measurement | None) -> None:
        self.has_finished = True
        self._session.finished(measurement)

    def starts_own_ranks(self, reason: str) -> None:
        """Ends a trial whose program starts ranks of its own, unless it trains already. A child of the rank raises."""
        if self.has_engine:
            return
        if os.getpid() != self._process:
            raise RuntimeError(reason)
        self.refuse("invalid", reason)

    def initialize_called(self) -> None:
        """Ends the phase of imports, and applies the memory limit to the process from now on."""
        if not self.has_engine:
            interception.engine_begins()
            self._end_phase("import")
            try:
                expected.require()
                self.memory.begin(self._order.memory_limit)
            except (expected.OtherDeviceError, UnknownDeviceError) as error:
                self.refuse("invalid", str(error), elsewhere=True)

    def frozen_engine_built(self) -> None:
        self.has_frozen_engine = True

    def engine_built(self, engine: Any) -> None:
        """Watches the first engine that trains, and leaves the others out."""
        if self._watch is not None:
            self._watch.leave_out(engine)
            return
        self.thread = threading.current_thread()
        self._plain_steps.end()
        self._end_phase("initialize")
        device = device_of(engine.device)
        self.memory.engine_built(device)
        self._watch_engine(engine, device)
        self._session.engine_built()

    def _watch_engine(self, engine: Any, device: Device) -> None:
        asked = int(self._order.overrides.get(MICRO_BATCH, engine.train_micro_batch_size_per_gpu()))
        watch = PipelineWatch if hasattr(engine, "_exec_schedule") else EngineWatch
        # What stands for an engine brings its own.
        watch = getattr(engine, "watched_by", watch)
        self.facts.note(engine=in_force(engine))
        if self._order.is_typed_profile:
            self.facts.note_typed_engine(engine, self._order.varied_options)
        self._watch = watch(
            engine, device, asked, self, with_activations=self._order.with_profile, arrival=self._order.arrival
        )
        refuse_other_replicas(engine, self._order.replicas, self.refuse)
        self._first_steps.begin(engine)
        self._begin_warm_up()
        self._watch.clock.mark()

    def _begin_warm_up(self) -> None:
        # The stages of a pipeline exchange batches of one length.
        if not self.is_pipeline:
            self._warm_up.begin(self._watched)

    def first_batch_arrived(self, sizes: tuple[int, ...], tokens: int | None) -> None:
        watch, as_typed = self._watched, self._order.is_typed_profile
        if as_typed:
            watch.asked = self.facts.note_typed_engine(watch.engine, self._order.varied_options)
        watch.arrival = (Arrival.of_typed if as_typed else watch.arrival.at)(watch.asked, sizes, tokens)
        self.facts.note_arrival(watch.arrival)
        self.facts.note(samples_per_epoch=loader_batches.samples_per_epoch)
        if as_typed:
            # These facts are now safe, whatever ends the program.
            self._session.engine_built()
        self._arrived = watch.rows_in(sizes), tokens
        refuse_unequal_batches(watch.engine, watch.first_digest, self.refuse)
        if self._order.ends_at_arrival and not self.is_pipeline:
            self._compare_with_what_was_asked()
            # A rank that ended earlier would end the others.
            self.on_most_demanding_rank([0.0])
            self.refuse("completed", "")
        self._first_steps.training_begins(watch.engine, self._order.rounding)

    def optimizer_step_begins(self) -> None:
        self._first_steps.step_begins(self._watched.engine)

    def other_engine_stepped(self, engine: Any) -> None:
        """Watches another engine if the first one never trains, although it has an optimizer."""
        self.facts.note(steps_elsewhere=self.facts.found.steps_elsewhere + 1)
        if self._watch is None or self._watch.has_trained or isinstance(self._watch, PipelineWatch):
            return
        self._watch.end()
        for name in ("backward", "step", "scale"):
            vars(engine).pop(name, None)
        self._watch_engine(engine, self._watch.device)

    def group_destroyed(self) -> None:
        """Measures the steps so far if they are enough, because the code may continue with another group."""
        if self.has_finished:
            self._finish(None)
        if os.getpid() == self._process and len(self._counted.steps) >= self.window.enough_at_end:
            self._session.end_early()

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        self._phases[name] = now - self._phase_started
        self._phase_started = now

    def optimizer_step_ended(self, applied: bool) -> None:
        """At the moments of the window, all ranks agree on whether to go on."""
        if self.has_finished:
            self._finish(None)
        watch = self._watched
        if watch.device.is_recording():
            return
        if self._traced is not None:
            self._go_on_tracing()
            return
        # Every step is timed, and adds to the peak of memory.
        time_taken = watch.clock.step_ended(watch.parts.take())
        self.memory.step_ended(watch.device, self.steps_seen + 1 >= self._order.window.start_step)
        self.steps_seen += 1
        # The first step shows whether the program follows the candidate.
        if self.steps_seen == 1:
            self.thread = threading.current_thread()
            self._session.training_began()
            self._end_phase("first_step")
            self._compare_with_what_was_asked()
        reason = self._skipped.reason_after(applied, watch.loss)
        if reason and self._survey is None:
            self.refuse("diverged", reason)
        self._warm_up.step_ended(watch, self.steps_seen)
        step = CountedStep(
            time_taken, watch.take_arrived(), self._compilations.were_made(), loader_batches.take_loading()
        )
        self._first_steps.add(watch.take_loss(), watch.engine, applied)
        # After the warm-up, a step counts if it was applied. Later steps are those of a profile's surveys.
        if self._survey is not None:
            self._go_on_surveying()
        elif applied and self.steps_seen >= self._order.window.start_step:
            if self._counted.follow_batch(watch.engine, self.window.min_steps):
                self.measure_common(len(self._counted.steps), self.steps_seen - 1, "")
            if self._counted.add(step, watch.loss):
                self._decide()
        watch.clock.mark()

    def _decide(self) -> None:
        # Ends the measurement if it is enough, or if the trial cannot win. All ranks decide at the same moments.
        window, to_beat, counted = self._order.window, self._order.to_beat, self._counted
        is_moment = len(counted) >= max(next_moment(window, counted.slowest), counted.next_covered)
        if not is_moment and (to_beat is None or not looks_after(window, len(counted))):
            return
        samples = counted.agree(self._watched)
        is_moment &= len(counted) >= min(window.min_steps, window.max_steps)
        if is_moment and is_enough(window, counted.slowest) and counted.cover_cycle(window.max_seconds):
            self._end_phase("steps")
            if self._order.with_profile:
                self._go_on_surveying()
            elif self._order.traces:
                self._go_on_tracing()
            else:
                self._finish(self._measurement())
        elif to_beat is not None and is_hopeless(counted.slowest, samples, to_beat):
            self._end_phase("steps")
            self._finish(self._record("too_slow", too_slow_reason(counted.slowest, samples, to_beat)))

    def _go_on_tracing(self) -> None:
        if self._traced is None:
            self._traced = TracedEnd(self._watched, self._measurement(), self._counted.slowest, self._session.keep)
        measurement = self._traced.go_on()
        if measurement is not None:
            self._end_phase(TRACE)
            self._finish(measurement)

    def _go_on_surveying(self) -> None:
        if not self._surveying().step_ended():
            self._end_phase("survey")
            self._finish(self._measurement())

    def _surveying(self) -> Surveys:
        if self._survey is None:
            keep, most_of = (lambda: self._session.keep(self._measurement())), self.on_most_demanding_rank
            as_typed = self._order.is_typed_profile
            self._survey = Surveys(self._watched, self.facts, as_typed, most_of, keep, self._about_to_count)
        return self._survey

    def _about_to_count(self) -> None:
        # Keeps the measurement so far, because the next step is not the training's own.
        self.memory.end(self._watched.device)
        self._session.keep(self._measurement())

    def _compare_with_what_was_asked(self) -> None:
        # Ends a trial if its first micro-batch, or its first optimizer step, was other than the candidate's.
        watch, source = self._watched, self._source
        if self._order.is_typed_profile:
            self.facts.note(micro_batches_per_step=watch.micro_batches)
        asked, accumulation = (self._order.overrides.get(key) for key in (MICRO_BATCH, ACCUMULATION))
        if asked is not None and self._arrived is not None and not watch.arrival.follows(asked, *self._arrived):
            rows, found = self._arrived[0], self.facts.found
            reason = source.ignored_batch_reason(asked, rows, found.ds_config, accumulation or 1, found.divided_among)
            arrived = round(watch.arrival.samples(rows, watch.asked))
            self.refuse("invalid", reason, micro_batch_arrived=arrived)
        if self.steps_seen and accumulation and not watch.arrival.accumulates(accumulation, watch.micro_batches):
            self.refuse("invalid", source.ignored_accumulation_reason(accumulation, watch.micro_batches))

    @property
    def window(self) -> StepWindow:
        return self._order.window

    @property
    def micro_batches(self) -> int:
        return 0 if self._watch is None else self._watch.micro_batches

    @property
    def progress(self) -> dict[str, int]:
        return {"micro_batches": self.micro_batches, "steps": self.steps_seen, "counted": len(self._counted.steps)}

    @property
    def batch(self) -> tuple[int, int]:
        engine = self._watched.engine
        return int(engine.train_micro_batch_size_per_gpu()), int(engine.gradient_accumulation_steps())

    def refuse(self, outcome: str, reason: str, **more: Any) -> None:
        self._finish(Measurement(outcome=outcome, reason=reason, phases=self._phases, **more))

    def measure_common(self, counted: int, steps: int, note: str) -> None:
        """Measures the steps that all ranks have counted, after the user's code has ended.

        `note`: on those left out.
        """
        if self._traced is not None:
            self._finish(self._traced.cut_short())
        self._counted.keep(counted)
        self._first_steps.keep(steps)
        self._counted.agree(self._watched, is_over=True)
        self._end_phase("steps" if self._survey is None else "survey")
        measurement = self._measurement()
        measurement = replace(measurement, note=" ".join(filter(None, (measurement.note, note))))
        self._finish(with_data_over(measurement) if self._order.traces else measurement)

    def on_most_demanding_rank(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks; all of them call it."""
        return most(values, self._watched.engine)

    def _measurement(self) -> Measurement:
        # The metrics. Every rank takes part, because some are sums and maxima over all ranks.
        if self._order.is_typed_profile:
            self._surveying().conclude()
        finite = self._counted.are_finite
        measurement = self._record("completed" if finite else "diverged", "" if finite else NOT_FINITE)
        metrics = self._counted.metrics(self._watched, self._order.flops_per_sample, self._order.formats)
        if not self._order.with_profile:
            return replace(measurement, metrics=metrics)
        profile = model_profile(self._watched, self.memory.slot_bytes(self._watched.device))
        return replace(measurement, metrics=metrics, program=self.facts.found, profile=profile)

    def _record(self, outcome: str, reason: str) -> Measurement:
        # The record of the counted steps, whatever ends the trial. Every rank takes part.
        watch = self._watched
        # With some loaders one rank reads for all.
        offset, places = loader_batches.offset if self._order.data_offset else (0, None)
        own = [float(-1 if each is None else each) for each in (watch.longest_sequence or 0, offset, places)]
        longest, *moved = most(own, watch.engine)
        offset, places = (None if each < 0 else int(each) for each in moved)
        measurement = Measurement(
            outcome=outcome,
            reason=reason,
            step_times=self._counted.slowest,
            micro_batch_arrived=watch.first_micro_batch,
            longest_sequence=int(longest) or None,
            data_offset=offset,
            data_places=places,
            note=" ".join(filter(None, (self._warm_up.note(int(longest)), self._counted.note))),
            memory=self.memory.figures(watch.device),
            phases=self._phases,
        )
        if self._keeps_engine:
            # It has trained before, so it has no losses from step 1 on.
            return measurement
        return replace(measurement, **self._first_steps.over_ranks(watch.engine))
