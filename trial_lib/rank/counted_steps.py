"""The optimizer steps of a rank that count, and their metrics over all ranks."""

import itertools
import math
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from zerotune.trial_lib.deepspeed_config.overrides import replicas_of
from zerotune.trial_lib.device.base import available_bytes
from zerotune.trial_lib.device.data_sheets import multiplied_in
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.rank import memory
from zerotune.trial_lib.rank.engine_watch import PARTS, EngineWatch, PipelineWatch, StepTime, part_of_replica
from zerotune.trial_lib.rank.flops import FlopShare, are_shares_of_one
from zerotune.trial_lib.rank.loader_batches import StepLoading
from zerotune.trial_lib.rank.memory import bytes_by_code
from zerotune.trial_lib.rank.rank_consensus import most, of_each, total
from zerotune.trial_lib.rank.tensor_parallel import (
    expert_counts,
    expert_ranks,
    head_counts,
    layer_count,
    parameter_shares,
)

# The optimizer steps of a rank that count, and their metrics over all ranks.


# The step time of a program that waits for the workers of a data loader

# With a smaller share of waiting, the mean of any steps is off by no more than this share.
_LEAST_SHARE = 0.1
# A cycle of more steps would take too long to measure.
_LONGEST = 32


def share_of_wait(steps: Sequence[tuple[float, float]]) -> float:
    """The share of steps' time spent waiting for batches, from the seconds of waiting and of the whole of each step."""
    whole = sum(seconds for _, seconds in steps)
    return sum(waited for waited, _ in steps) / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class WorkerCycle:
    """The cycle of a loader's workers in some counted steps."""

    length: int = 1  # of the cycle in steps; 1 if the program does not wait for workers
    # Where each counted step is in its cycle, as `StepLoading.phase` has it. May be empty if `length` is 1.
    phases: tuple[float, ...] = ()

    @classmethod
    def of(cls, phases: Sequence[float], length: int, share: float) -> "WorkerCycle":
        if share < _LEAST_SHARE or not 1 < length <= _LONGEST:
            return cls(1, tuple(phases))
        # An epoch of a single step has no others.
        return cls(length, tuple(phases) if any(map(_is_in_cycle, phases)) else (0.0,) * len(phases))

    @property
    def missing(self) -> int:
        """Steps of the cycle that none of the counted ones stands for."""
        return max(0, self.length - len(set(filter(_is_in_cycle, self.phases)))) if self.length > 1 else 0

    @property
    def is_covered(self) -> bool:
        # Or enough steps have been tried.
        return not self.missing or len(self.phases) >= 2 * _LONGEST

    def step_time(self, step_times: Sequence[float]) -> float:
        if self.length == 1:
            pairs = itertools.zip_longest(step_times, self.phases, fillvalue=-1.0)
            usual = [seconds for seconds, phase in pairs if phase < math.inf]
            # A training pays the start of workers once an epoch. Two starts show how long that is.
            return statistics.fmean(usual if len(step_times) - len(usual) == 1 and usual else step_times)
        of_phases: dict[float, list[float]] = {}
        for phase, seconds in zip(self.phases, step_times, strict=True):
            if _is_in_cycle(phase):
                of_phases.setdefault(phase, []).append(seconds)
        # Counted steps seldom are whole cycles, so each step of the cycle has the same weight.
        return statistics.fmean(statistics.fmean(times) for times in of_phases.values())


def _is_in_cycle(phase: float) -> bool:
    return 0 <= phase < math.inf


# Dynamo itself gives up a function that it has compiled eight times (`recompile_limit`), and a program has several. If
# more than these steps compile, compilation is a part of the training.
_MOST_THAT_COMPILE = 16
# For the cycle of many workers whose steps are long. Minutes would cost more than the error of some of them.
_TIMES_THE_USUAL = 20
_NOTE_OF_COMPILED = "The program compiles in its measured steps, so their times include that."


@dataclass(frozen=True)
class CountedStep:
    """A step as this rank has timed it."""

    time: StepTime  # of the step
    arrived: Mapping[str, float]  # the batches of the step, as `EngineWatch.take_arrived` has them
    has_compiled: bool = False  # whether the rank has compiled something meanwhile
    loading: StepLoading = field(default_factory=StepLoading)  # how it got its batches

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The times as `StepTime.seconds` has them, once the device has done the step."""
        return self.time.seconds()


@dataclass
class CountedSteps:
    """The steps that this rank has timed.

    When the ranks agree, steps in which any rank has compiled something are left out, because they belong to the
    warm-up. Until then each rank has as many steps as the others, so that all reach the same moments.
    """

    steps: list[CountedStep] = field(default_factory=list)  # in their order
    # Seconds of each step on the slowest rank, as of the last agreement
    slowest: list[float] = field(default_factory=list)
    # The last loss of each step, on its device; fewer if the code shows none
    losses: list[torch.Tensor] = field(default_factory=list)
    batch: int | None = None  # the engine's global batch in these steps; None before the first
    note: str = ""  # a sentence on the steps for the reader; may be empty
    # Counted steps after which `cover_cycle` is expected to hold, as of the last agreement. 0 if it holds, or is not
    # needed.
    next_covered: int = 0
    # Whether the device has been idle since the last step.
    _has_rested: bool = False
    _cycle: WorkerCycle = field(default_factory=WorkerCycle)
    # Positions of the steps that are left out.
    _left_out: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.steps) - len(self._left_out)

    @property
    def in_use(self) -> list[CountedStep]:
        return [step for place, step in enumerate(self.steps) if place not in self._left_out]

    def cover_cycle(self, usual_s: float) -> bool:
        """Whether the steps show what training pays for its data, or take many times the usual seconds."""
        return self._cycle.is_covered or sum(self.slowest) >= _TIMES_THE_USUAL * usual_s

    def add(self, step: CountedStep, loss: torch.Tensor | None) -> bool:
        """Counts a step, unless it began after `agree`, where the program could not run ahead of its device."""
        has_rested, self._has_rested = self._has_rested, False
        if has_rested:
            return False
        self.steps.append(step)
        if loss is not None:
            self.losses.append(loss)
        return True

    def follow_batch(self, engine: Any, enough: int) -> bool:
        """Starts again if the code has changed the engine's batch. True if that comes after `enough` counted steps.

        All counted steps need the same batch, so every trial is measured at the first one that lasts. The code changes
        the batch on all ranks alike.
        """
        batch = int(engine.train_batch_size())
        before, self.batch = self.batch, batch
        if before is None or before == batch:
            return False
        is_enough = len(self) >= enough
        measured = before if is_enough else batch
        self.note = f"The program changes its batch as it trains. It was measured at a global batch of {measured}."
        if not is_enough:
            self.keep(0)
            self.slowest, self.next_covered, self._cycle = [], 0, WorkerCycle()
        return is_enough

    def keep(self, count: int) -> None:
        del self.steps[count:], self.losses[count:]
        self._left_out = frozenset(place for place in self._left_out if place < count)

    def agree(self, watch: EngineWatch, is_over: bool = False) -> float:
        """Collects the other ranks' times. Returns the samples of a step over all ranks, the same on each rank.

        It is an upper bound: each rank counts as many samples as the one with the most. With `is_over`, no step
        follows, and steps that compile count if there are no others.
        """
        if self.steps:
            device = self.steps[-1].time.device
            device.finish()
            self._has_rested = device.is_apart
        count = len(self.steps)
        # Training pays the start of workers once an epoch, which is many steps.
        usual = [step for step in self.in_use if not step.loading.begins] or self.in_use
        # One reduction brings all times, compilations and places in the workers' cycle.
        own = [
            *(step.seconds["latency"] for step in self.steps),
            *(float(step.has_compiled) for step in self.steps),
            *(step.loading.phase(self.steps[0].loading) for step in self.steps),
            share_of_wait([(step.loading.waited_s, step.seconds["latency"]) for step in usual]),
            float(max((step.loading.cycle for step in usual), default=1)),
        ]
        samples = self._samples(watch) * replicas_of(watch.engine)
        *agreed, share, length, most_samples = most([*own, samples], watch.engine)
        compiled = [place for place in range(count) if agreed[count + place]]
        left_out = [] if is_over and len(compiled) == count else compiled[:_MOST_THAT_COMPILE]
        if len(left_out) < len(compiled) and _NOTE_OF_COMPILED not in self.note:
            self.note = f"{self.note} {_NOTE_OF_COMPILED}".lstrip()
        self._left_out = frozenset(left_out)
        self.slowest = [agreed[place] for place in range(count) if place not in self._left_out]
        phases = [agreed[2 * count + place] for place in range(count) if place not in self._left_out]
        self._cycle = WorkerCycle.of(phases, int(length), share)
        # On an accelerator the step after an agreement does not count. It may be the very one that is missing.
        more = self._cycle.length if self._has_rested else self._cycle.missing
        self.next_covered = 0 if self._cycle.is_covered else len(self) + more
        return most_samples

    @property
    def are_finite(self) -> bool:
        return all(bool(torch.isfinite(loss).all()) for loss in self.losses)

    def metrics(
        self, watch: EngineWatch, flops_per_sample: float | None, formats: Collection[str] | None
    ) -> dict[str, float]:
        """The metrics by name, for an engine whose ranks have agreed: all samples over all time of the counted steps.

        FLOPs of a sample are the same in all trials of a study: padding to the longest of a micro-batch would otherwise
        count as work. None counts them here. `formats` are of the program's arithmetic, beside the engine's, and decide
        on the peak that model FLOPs utilisation is relative to. None leaves the utilisation out.
        """
        engine, ranks, steps = watch.engine, torch.distributed.get_world_size(), self.in_use
        # A training pays for every step, the slow ones too. So these are means, and the clock runs on between steps.
        means = {part: statistics.fmean(step.seconds[part] for step in steps) for part in (*PARTS, "cpu")}
        own_latency = self._cycle.step_time([step.seconds["latency"] for step in steps])
        # The slowest rank over all steps. The slowest of each step would add up to more than the clock shows.
        latency, *parts = most([own_latency, *(means[part] for part in PARTS)], engine)
        own_tokens = statistics.fmean(float(step.arrived["tokens"]) for step in steps)
        sizes = [step.arrived["elements"] for step in steps]
        cpu_seconds, all_samples, all_tokens, with_tokens, *all_sizes = total(
            [means["cpu"], self._samples(watch), own_tokens, float(own_tokens > 0), *sizes], engine
        )
        replicas = replicas_of(engine)
        # Ranks of one replica have the same samples. An inner stage of a pipeline has as many as its engine is set to.
        samples = all_samples / ranks * replicas
        flops = _flops_per_sample(watch) if flops_per_sample is None else flops_per_sample
        metrics = {
            "latency": latency,
            "latency_spread": statistics.stdev(self.slowest) if len(self.slowest) > 1 else 0.0,
            # Of the numbers in a step's batches. Without it all steps are the same work, as far as their batches show.
            "data_spread": statistics.pstdev(all_sizes) / (statistics.fmean(all_sizes) or 1.0),
            "measured_steps": float(len(self.slowest)),
            **dict(zip(PARTS, parts, strict=True)),
            "throughput": samples / latency,
            **({"FLOPS_per_gpu": flops * samples / latency / ranks} if flops else {}),
        }
        if not self.steps[0].time.device.is_apart:
            # If a processor waits for its device, this is the time of the wait.
            metrics["cpu_time_per_sample"] = cpu_seconds / samples
        if with_tokens:
            metrics["tokens_per_second"] = all_tokens / with_tokens * replicas / latency
        multiplied = multiplied_in({*formats, *memory.formats(engine)}) if formats else None
        peak = None if multiplied is None else watch.device.peak_flops(multiplied)
        if peak is not None and flops:
            metrics["mfu"] = metrics["FLOPS_per_gpu"] / peak
        if self.losses and self.are_finite:
            metrics["loss_first"], metrics["loss_last"] = float(self.losses[0]), float(self.losses[-1])
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _samples(self, watch: EngineWatch) -> float:
        # The samples of a step on this rank; the engine's setting if the batches show none.
        asked = float(watch.engine.train_micro_batch_size_per_gpu() * watch.engine.gradient_accumulation_steps())
        arrived = [watch.samples_in(step.arrived) for step in self.in_use]
        return (statistics.fmean(arrived) if arrived else 0.0) or asked


def model_profile(watch: EngineWatch, memory_bytes: int) -> ModelProfile:
    """`memory_bytes` are those that it may use on this slot."""
    replicas = replicas_of(watch.engine)
    counts = total(parameter_shares(watch.engine), watch.engine)
    kept = watch.model.activation_bytes / watch.samples_kept
    activation_bytes, divided_over = most([kept, float(expert_ranks(watch.engine.module))], watch.engine)
    return ModelProfile(
        num_params=round(counts[0] / replicas),
        trainable_num_params=round(counts[1] / replicas),
        linear_params=round(counts[2] / replicas),
        expert_params=round(counts[3] / replicas),
        expert_ranks=round(divided_over),
        head_counts=head_counts(watch.engine.module),
        expert_counts=expert_counts(watch.engine.module),
        layer_count=layer_count(watch.engine.module),
        activation_mem_per_gpu=round(activation_bytes),
        gpu_mem=memory_bytes,
        host_mem=_host_bytes(watch),
        data_parallel_size=replicas,
        pipeline_parallel=isinstance(watch, PipelineWatch),
        flops_per_sample=_flops_per_sample(watch),
        uncounted=sorted(watch.model.uncounted),
        bytes_per_param=bytes_by_code(watch.engine),
    )


def _host_bytes(watch: EngineWatch) -> int:
    # The bytes that each rank may still take of its host's memory, on the host with the least; 0 on a CPU.
    if not watch.device.is_apart:
        return 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    (most_taken,) = most([-(available_bytes() or 0) / ranks], watch.engine)
    return round(-most_taken)


def _flops_per_sample(watch: EngineWatch) -> float:
    # The FLOPs of all ranks of a replica for a sample; 0 if the ranks' counts are no shares of one figure.
    engine, samples = watch.engine, watch.samples_counted
    own = [float(watch.model.flops), samples, watch.counted_elements / samples, float(part_of_replica(engine))]
    counts = of_each(own, engine)
    # A stage of a pipeline may only look up embeddings, and an expert gets as many tokens as are routed to it.
    if not isinstance(watch, PipelineWatch):
        if not all(flops for flops, *_ in counts):
            return 0.0
        of_parts: dict[float, list[FlopShare]] = {}
        for flops, its_samples, elements, part in counts:
            of_parts.setdefault(part, []).append(FlopShare(flops / its_samples, elements))
        if not engine.has_moe_layers and not all(are_shares_of_one(shares) for shares in of_parts.values()):
            return 0.0
    replicas = replicas_of(engine)
    return sum(flops for flops, *_ in counts) * len(counts) / (replicas * sum(each[1] for each in counts))
