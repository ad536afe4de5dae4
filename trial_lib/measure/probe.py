"""The probe: it stands in for `deepspeed.initialize`, measures the engine, and ends the rank when it has enough.

The user's code stays as it is. The candidate's overrides are merged into whatever configuration the code passes; the
first engine it builds is the one that is measured.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trial_lib.experiment.overrides import MICRO_BATCH
from trial_lib.experiment.window import StepWindow
from trial_lib.measure import memory
from trial_lib.measure.batch_source import BatchSource
from trial_lib.measure.devices import peak_flops
from trial_lib.measure.engine_watch import PARTS, EngineWatch, PipelineWatch
from trial_lib.measure.interception import intercept
from trial_lib.measure.program_facts import ProgramFacts
from trial_lib.measure.window import decides_after, is_enough

current: "Probe | None" = None
"""The probe of this process; None where it is no rank of a trial."""

# Dynamic loss scaling halves its scale some dozen times before it fits; more is no search for a scale.
_MOST_SKIPPED_IN_A_ROW = 100
# A program may warm something up by plain torch before it has an engine, but not for as long.
_MOST_PLAIN_STEPS = 100
# Enough to see whether two configurations train alike.
_MOST_STEP_LOSSES = 16
_NOT_FINITE = "The loss was not finite; a smaller learning rate or fp32 may help."


@dataclass(frozen=True)
class ProbeSettings:
    """What a driver asks of the probe.

    Attributes:
        overrides: the candidate's part of the DeepSpeed configuration.
        window: the steps to measure.
        memory_limit: bytes that a CPU slot may use; None for no limit.
        with_profile: whether to profile the model too.
        batch_source: where the program may have its batch size from.
    """

    overrides: dict[str, Any]
    window: StepWindow
    memory_limit: int | None
    with_profile: bool
    batch_source: BatchSource


class Probe:
    """Measures the first engine of a rank.

    Args:
        settings: what to do.
        phases: seconds of the rank's phases so far, to be continued.
        engine_built: called when the first engine is there.
        finish: called with the measurement when there is enough; it ends the rank and does not return.

    Attributes:
        facts: what was found out about the program.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        phases: dict[str, float],
        engine_built: Callable[[], None],
        finish: Callable[[dict[str, Any]], None],
    ) -> None:
        self.facts = ProgramFacts()
        self._settings = settings
        self._phases = phases
        self._tell_engine_built = engine_built
        self._finish = finish
        # A child that the program forks is not the rank, though it has all that the rank has.
        self._process = os.getpid()
        self._watch: EngineWatch | None = None
        self._steps_seen = 0
        self._skipped_in_a_row = 0
        self._counted: list[dict[str, float]] = []
        self._slowest: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._memory_after_initialize: dict[str, int] = {}
        self._step_losses: list[torch.Tensor] = []
        self._memory_budget: int | None = None
        self._phase_started = time.time()
        self._started: tuple[float, ...] = (0.0, 0.0)
        self._paused: tuple[float, ...] | None = None
        self._plain_steps = 0

    @property
    def steps_seen(self) -> int:
        """Optimizer steps that the watched engine has taken."""
        return self._steps_seen

    @property
    def has_engine(self) -> bool:
        """Whether the code has built an engine."""
        return self._watch is not None

    def install(self) -> None:
        """Puts the probe in the place of DeepSpeed's functions; to be called before the user's code is imported."""
        global current
        current = self
        intercept(self._settings.overrides, self.facts, self)
        self._plain_hook = register_optimizer_step_post_hook(self._plain_step)

    def _plain_step(self, *_: Any) -> None:
        """Ends a trial that trains without DeepSpeed: its deadline is half an hour away."""
        self._plain_steps += 1
        if self._plain_steps == _MOST_PLAIN_STEPS and os.getpid() == self._process:
            reason = (
                f"The program has taken {_MOST_PLAIN_STEPS} optimizer steps without a DeepSpeed engine: it trains "
                "without DeepSpeed. Let it call deepspeed.initialize, or give it the argument with which it does."
            )
            self._finish({"outcome": "invalid", "reason": reason, "phases": self._phases})

    def initialize_called(self) -> None:
        """Notes that the imports are over, and holds the process to its memory limit from here on."""
        if not self.has_engine:
            self._end_phase("import")
            if self._settings.memory_limit is not None:
                self._memory_budget = memory.limit(self._settings.memory_limit)

    def engine_built(self, engine: Any) -> None:
        """Watches the first engine, and keeps the others apart from it."""
        if self._watch is not None:
            self._watch.leave_out(engine)
            return
        self._plain_hook.remove()
        self._end_phase("initialize")
        available = memory.available_bytes()
        self._memory_after_initialize = {
            "after_initialize": memory.used_bytes(),
            **({} if available is None else {"available": available}),
        }
        self._watch_engine(engine)
        self._tell_engine_built()

    def _watch_engine(self, engine: Any) -> None:
        asked = int(self._settings.overrides.get(MICRO_BATCH, engine.train_micro_batch_size_per_gpu()))
        watch = PipelineWatch if hasattr(engine, "_exec_schedule") else EngineWatch
        self._watch = watch(engine, asked, self, with_activations=self._settings.with_profile)
        self._mark()

    def other_engine_stepped(self, engine: Any) -> None:
        """Turns to another engine where the first never trains: it holds the reference model, say, or the teacher."""
        if self._watch is None or self._watch.has_trained or isinstance(self._watch, PipelineWatch):
            return
        self._watch.end()
        for name in ("backward", "step"):
            delattr(engine, name)
        self._watch_engine(engine)

    def group_destroyed(self) -> None:
        """Measures what there is while the ranks can still agree."""
        self.finish_early()

    def pause(self) -> None:
        """Leaves out of the optimizer step's time what follows, until `resume`."""
        if self._paused is None:
            self._paused = self._clocks()

    def resume(self) -> None:
        """Goes on counting after `pause`; harmless where nothing is paused."""
        if self._paused is None:
            return
        now = self._clocks()
        self._started = tuple(
            start + end - pause for start, end, pause in zip(self._started, now, self._paused, strict=True)
        )
        self._paused = None

    def _end_phase(self, name: str) -> None:
        now = time.time()
        self._phases[name] = now - self._phase_started
        self._phase_started = now

    @staticmethod
    def _clocks() -> tuple[float, ...]:
        """Returns the seconds of wall clock and of processor time, when the device has done what it was given."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def _mark(self) -> None:
        """Starts the time of the next optimizer step."""
        self._started = self._clocks()
        if self._paused is not None:
            self._paused = self._started

    def optimizer_step_ended(self, applied: bool) -> None:
        """Notes an optimizer step; at the moments of the window, agrees with the other ranks on going on."""
        watch = self._watch
        assert watch is not None
        now = self._clocks() if self._paused is None else self._paused
        seconds, cpu_seconds = (end - start for start, end in zip(self._started, now, strict=True))
        self._steps_seen += 1
        if self._steps_seen == 1:
            self._end_phase("first_step")
            self._refuse_ignored_batch()
        self._skipped_in_a_row = 0 if applied else self._skipped_in_a_row + 1
        if not applied:
            self._end_if_it_never_trains()
        parts, samples, loss = watch.parts.take(), watch.take_samples(), watch.take_loss()
        if loss is not None and len(self._step_losses) < _MOST_STEP_LOSSES:
            self._step_losses.append(loss)
        if applied and self._steps_seen >= self._settings.window.start_step:
            self._counted.append({"latency": seconds, "cpu": cpu_seconds, "samples": float(samples), **parts})
            if watch.loss is not None:
                self._losses.append(watch.loss)
            if decides_after(self._settings.window, len(self._counted)):
                self._slowest = self._on_slowest_rank([step["latency"] for step in self._counted])
                if is_enough(self._settings.window, self._slowest):
                    self._end_phase("steps")
                    self._finish(self._measurement())
        self._mark()

    def _end_if_it_never_trains(self) -> None:
        """Ends a trial whose steps are skipped for good: DeepSpeed skips those whose gradients are not finite."""
        watch = self._watch
        assert watch is not None
        if watch.loss is not None and not bool(torch.isfinite(watch.loss).all()):
            self._finish({"outcome": "diverged", "reason": _NOT_FINITE, "phases": self._phases})
        if self._skipped_in_a_row == _MOST_SKIPPED_IN_A_ROW:
            reason = f"{_MOST_SKIPPED_IN_A_ROW} optimizer steps in a row were skipped: their gradients were not finite."
            self._finish({"outcome": "diverged", "reason": reason, "phases": self._phases})

    def _refuse_ignored_batch(self) -> None:
        watch = self._watch
        assert watch is not None
        asked = self._settings.overrides.get(MICRO_BATCH)
        arrived = watch.first_micro_batch
        if asked is not None and arrived is not None and arrived != asked:
            self._finish(
                {
                    "outcome": "invalid",
                    "reason": self._settings.batch_source.ignored_batch_reason(asked, arrived, self.facts.ds_config),
                    "micro_batch_arrived": arrived,
                    "phases": self._phases,
                }
            )

    def finish_early(self) -> bool:
        """Measures what there is when the user's code has ended by itself; False if that is too little."""
        if os.getpid() != self._process or len(self._counted) < self._settings.window.min_steps:
            return False
        self._slowest = self._on_slowest_rank([step["latency"] for step in self._counted])
        self._end_phase("steps")
        self._finish(self._measurement())
        return True

    def _reduce(self, values: list[float], operation: Any) -> list[float]:
        """Returns `values` reduced over all ranks."""
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return values
        assert self._watch is not None
        tensor = torch.tensor(values, dtype=torch.float64, device=self._watch.engine.device)
        torch.distributed.all_reduce(tensor, op=operation)
        return [float(value) for value in tensor.tolist()]

    def _on_slowest_rank(self, values: list[float]) -> list[float]:
        return self._reduce(values, torch.distributed.ReduceOp.MAX)

    def _mean_losses(self) -> list[float]:
        """Returns the mean loss over all ranks of each of the first optimizer steps."""
        own = [float(loss) for loss in self._step_losses]
        missing = [0.0] * (_MOST_STEP_LOSSES - len(own))
        # Of one length on every rank, whatever each has seen.
        summed = self._reduce([*own, *missing, *(1.0 for _ in own), *missing], torch.distributed.ReduceOp.SUM)
        totals, ranks = summed[:_MOST_STEP_LOSSES], summed[_MOST_STEP_LOSSES:]
        means = [total / count for total, count in zip(totals, ranks, strict=True) if count]
        return means if all(map(math.isfinite, means)) else []

    def _measurement(self) -> dict[str, Any]:
        """Returns the metrics; every rank takes part, for some are sums and maxima over all of them."""
        watch = self._watch
        assert watch is not None
        engine = watch.engine
        world_size = torch.distributed.get_world_size()
        replicas = int(engine.dp_world_size)
        asked = int(engine.train_micro_batch_size_per_gpu())
        medians = {part: statistics.median(step[part] for step in self._counted) for part in (*PARTS, "cpu")}
        names = [*medians, "activation"]
        slowest = dict(
            zip(names, self._on_slowest_rank([*medians.values(), float(watch.model.activation_bytes)]), strict=True)
        )
        parameters = list(engine.module.parameters())
        totals = self._reduce(
            [
                float(watch.model.flops),
                float(sum(_numel(parameter) for parameter in parameters)),
                float(sum(_numel(parameter) for parameter in parameters if parameter.requires_grad)),
                medians["cpu"],
            ],
            torch.distributed.ReduceOp.SUM,
        )
        arrived = watch.first_micro_batch or asked
        flops_per_sample = totals[0] / (replicas * arrived)
        latency = statistics.median(self._slowest)
        samples_per_step = statistics.fmean(step["samples"] for step in self._counted) or float(
            asked * engine.gradient_accumulation_steps()
        )
        throughput = samples_per_step * replicas / latency
        metrics = {
            "latency": latency,
            "latency_spread": statistics.stdev(self._slowest) if len(self._slowest) > 1 else 0.0,
            "measured_steps": float(len(self._slowest)),
            "forward": slowest["forward"],
            "backward": slowest["backward"],
            "step": slowest["step"],
            "throughput": throughput,
            "FLOPS_per_gpu": flops_per_sample * throughput / world_size,
            "cpu_time_per_sample": totals[3] / (samples_per_step * replicas),
        }
        if watch.tokens_per_sample is not None:
            metrics["tokens_per_second"] = throughput * watch.tokens_per_sample
        peak = peak_flops()
        if peak is not None:
            metrics["mfu"] = metrics["FLOPS_per_gpu"] / peak
        finite = True
        if self._losses:
            first, last = float(self._losses[0]), float(self._losses[-1])
            finite = all(bool(torch.isfinite(loss).all()) for loss in self._losses)
            if finite:
                metrics["loss_first"], metrics["loss_last"] = first, last
        measurement: dict[str, Any] = {
            "outcome": "completed" if finite else "diverged",
            "reason": "" if finite else _NOT_FINITE,
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
            "step_times": self._slowest,
            "losses": self._mean_losses(),
            "micro_batch_arrived": watch.first_micro_batch,
            "memory": {
                "peak": memory.peak_bytes(),
                **self._memory_after_initialize,
                **memory.allocator_figures(),
            },
            "phases": self._phases,
        }
        if self._settings.with_profile:
            measurement["program"] = self.facts.to_json()
            measurement["profile"] = {
                "num_params": round(totals[1] / replicas),
                "trainable_num_params": round(totals[2] / replicas),
                "activation_mem_per_gpu": round(slowest["activation"] / arrived),
                "gpu_mem": memory.device_bytes() if self._memory_budget is None else self._memory_budget,
                "data_parallel_size": replicas,
                "pipeline_parallel": isinstance(watch, PipelineWatch),
                "flops_per_sample": flops_per_sample,
            }
        return measurement


def _numel(parameter: torch.nn.Parameter) -> int:
    """Returns the elements of a parameter, also of one that ZeRO 3 has partitioned away."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
