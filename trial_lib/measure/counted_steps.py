"""The optimizer steps of a rank that count, and the metrics that come of them over all ranks."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from trial_lib.measure.devices import peak_flops
from trial_lib.measure.engine_watch import PARTS, EngineWatch, PipelineWatch
from trial_lib.measure.over_ranks import most, total


@dataclass
class CountedSteps:
    """Steps as this rank has timed them.

    Attributes:
        steps: of each the seconds (`latency`, processor time `cpu`, and each of its parts), `samples` and `tokens`.
        slowest: seconds of each step on the slowest rank, as the ranks have last agreed.
        losses: the last loss of each, on its device; fewer where the code shows none.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    slowest: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        """Returns how many there are."""
        return len(self.steps)

    def keep(self, count: int) -> None:
        """Leaves out the steps after the first so many: other ranks have no more."""
        del self.steps[count:], self.losses[count:]

    def agree(self, engine: Any) -> float:
        """Takes up the other ranks' times, and returns the samples of a step over all ranks, alike on each."""
        *self.slowest, samples = most([*(step["latency"] for step in self.steps), self._samples(engine)], engine)
        return samples

    def count_rows_as_samples(self, rows_per_sample: int) -> None:
        """Has the steps so far count each row for a sample, where so many were taken for one."""
        for step in self.steps:
            step["samples"] *= max(1, rows_per_sample)

    @property
    def are_finite(self) -> bool:
        """Whether no loss was infinite or not a number."""
        return all(bool(torch.isfinite(loss).all()) for loss in self.losses)

    def metrics(self, watch: EngineWatch, flops_per_sample: float | None) -> dict[str, float]:
        """Returns the metrics by name, of an engine whose ranks have agreed.

        Args:
            watch: of the engine.
            flops_per_sample: what a sample counts for, the same in all trials of a study: where samples are padded to
                the longest of their micro-batch, more of them would else be more work. None to count it here.
        """
        engine = watch.engine
        medians = {part: statistics.median(step[part] for step in self.steps) for part in (*PARTS, "cpu")}
        parts = dict(zip(PARTS, most([medians[part] for part in PARTS], engine), strict=True))
        (cpu_seconds,) = total([medians["cpu"]], engine)
        latency = statistics.median(self.slowest)
        samples = self._samples(engine)
        flops = _flops_per_sample(watch) if flops_per_sample is None else flops_per_sample
        metrics = {
            "latency": latency,
            "latency_spread": statistics.stdev(self.slowest) if len(self.slowest) > 1 else 0.0,
            "measured_steps": float(len(self.slowest)),
            **parts,
            "throughput": samples / latency,
            **({"FLOPS_per_gpu": flops * samples / latency / torch.distributed.get_world_size()} if flops else {}),
            "cpu_time_per_sample": cpu_seconds / samples,
        }
        tokens = statistics.fmean(step["tokens"] for step in self.steps)
        if tokens:
            metrics["tokens_per_second"] = tokens * int(engine.dp_world_size) / latency
        peak = peak_flops()
        if peak is not None and flops:
            metrics["mfu"] = metrics["FLOPS_per_gpu"] / peak
        if self.losses and self.are_finite:
            metrics["loss_first"], metrics["loss_last"] = float(self.losses[0]), float(self.losses[-1])
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _samples(self, engine: Any) -> float:
        """Returns the samples of a step over all ranks, as this one sees it."""
        asked = float(engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps())
        return (statistics.fmean(step["samples"] for step in self.steps) or asked) * int(engine.dp_world_size)


def model_profile(watch: EngineWatch, memory_bytes: int) -> dict[str, Any]:
    """Returns what a profile trial finds out about the model, as `ModelProfile` has it.

    Args:
        watch: of the engine.
        memory_bytes: that the model may use on this slot.
    """
    replicas = int(watch.engine.dp_world_size)
    parameters = list(watch.engine.module.parameters())
    counts = total(
        [
            float(sum(_numel(parameter) for parameter in parameters)),
            float(sum(_numel(parameter) for parameter in parameters if parameter.requires_grad)),
        ],
        watch.engine,
    )
    (activation_bytes,) = most([float(watch.model.activation_bytes)], watch.engine)
    return {
        "num_params": round(counts[0] / replicas),
        "trainable_num_params": round(counts[1] / replicas),
        "activation_mem_per_gpu": round(activation_bytes / _samples_counted(watch)),
        "gpu_mem": memory_bytes,
        "data_parallel_size": replicas,
        "pipeline_parallel": isinstance(watch, PipelineWatch),
        "flops_per_sample": _flops_per_sample(watch),
    }


def _flops_per_sample(watch: EngineWatch) -> float:
    """Returns what all ranks compute for a sample; 0 where one of them has counted nothing: that is no figure."""
    samples = _samples_counted(watch)
    flops, uncounted = total([float(watch.model.flops), float(not watch.model.flops)], watch.engine)
    if uncounted and not isinstance(watch, PipelineWatch):  # a stage of that may be a look-up alone
        return 0.0
    return flops / (int(watch.engine.dp_world_size) * samples)


def _samples_counted(watch: EngineWatch) -> int:
    """Returns the samples of the micro-batch that was counted."""
    return watch.first_micro_batch or int(watch.engine.train_micro_batch_size_per_gpu())


def _numel(parameter: torch.nn.Parameter) -> int:
    """Returns the elements of a parameter, also of one that ZeRO 3 has partitioned away."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
