"""The expected gain of a free batch, for a search that keeps the global batch. It is advice and is never measured."""

from collections.abc import Sequence
from math import exp

from trial_lib.records.candidate import Candidate
from trial_lib.records.result import TrialResult
from trial_lib.search.base import FreeBatchGain
from trial_lib.search.cost_model import CostModel, Point


def best_free_batch(
    best: tuple[Candidate, TrialResult], others: Sequence[Candidate], point: Point, model: CostModel
) -> FreeBatchGain | None:
    """Returns the best of some candidates that differ from the best one only in the batch; None if none is better.

    A larger micro-batch shares the overhead of a pass among more samples, by the cost model. A larger batch shares the
    optimizer's step among more samples, by the time that the best trial took for it.

    Args:
        best: the best candidate with the kept batch, and its trial.
        others: candidates with a free batch.
        point: the best candidate's place in the space.
        model: of the costs.
    """
    candidate, result = best
    step = min(1.0, result.metrics.get("step", 0.0) / result.metrics["latency"]) if "latency" in result.metrics else 0.0
    gains = []
    here, *there = model.size_effect(point.arm, [point.size, *(other.micro_batch_size for other in others)])
    for other, expected in zip(others, there, strict=True):
        share = step * _samples(candidate) / _samples(other)
        gains.append(FreeBatchGain(other, 1 / ((1 - step) * exp(float(expected - here)) + share)))
    gain = max(gains, key=lambda each: each.factor, default=None)
    return gain if gain is not None and gain.factor > 1 else None


def _samples(candidate: Candidate) -> int:
    return candidate.micro_batch_size * candidate.gradient_accumulation_steps
