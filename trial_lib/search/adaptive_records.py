"""What `adaptive` remembers of its trials."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import log
from statistics import median

from trial_lib.records.candidate import Candidate
from trial_lib.records.result import TrialResult
from trial_lib.search.cost_model import Point

# What the models are given of a long history: the best and the latest.
_BEST_KEPT, LATEST_KEPT = 120, 80
# What a trial that was stopped because it could not win is taken to cost more than the best, where no step was timed.
_TOO_SLOW = log(1.1)


@dataclass(frozen=True)
class PointCost:
    """A trial that tells what a point costs.

    Attributes:
        point: where the candidate stands.
        cost: logarithm of what the search makes small.
        candidate: what ran.
        step: seconds of an optimizer step (median); None where none was timed.
    """

    point: Point
    cost: float
    candidate: Candidate
    step: float | None


@dataclass(frozen=True)
class PossibleAnswer(PointCost):
    """A trial whose candidate may be the answer: it was asked for, and has completed."""

    result: TrialResult


@dataclass(frozen=True)
class InFlight:
    """A candidate that runs: where it stands in the space, and the number of the ask that it came with."""

    point: Point | None
    ask: int


def completed(point: Point, candidate: Candidate, cost: float, result: TrialResult, asked: bool) -> PointCost:
    """Returns what a trial that has completed tells; it may be the answer where it was asked for."""
    step = _step_seconds(result)
    return PossibleAnswer(point, cost, candidate, step, result) if asked else PointCost(point, cost, candidate, step)


def stopped(
    measured: Sequence[PointCost], point: Point, candidate: Candidate, result: TrialResult, by_sample: bool
) -> PointCost:
    """Returns what a trial tells that was stopped because it could not win; see `stopped_cost`."""
    cost = stopped_cost(measured, candidate, result, by_sample)
    return PointCost(point, cost, candidate, _step_seconds(result))


def stopped_cost(measured: Sequence[PointCost], candidate: Candidate, result: TrialResult, by_sample: bool) -> float:
    """Returns what a trial cost by the steps that it made before it was stopped because it could not win.

    Its steps are set against those of a trial that was measured to its end: whatever the metric counts, and however
    lucky the reading that was to beat.

    Args:
        measured: what is known, at least one.
        candidate: what ran.
        result: how it ended.
        by_sample: whether the cost is that of a sample, not of a step.
    """
    step = _step_seconds(result)
    # Of an earlier study's trials the steps are not known.
    timed = [(each.cost, each.step, _samples(each.candidate)) for each in measured if each.step is not None]
    if step is None or not timed:
        return min(each.cost for each in measured) + _TOO_SLOW
    best_cost, best_step, best_samples = min(timed)
    return best_cost + log(step / best_step) - (log(_samples(candidate) / best_samples) if by_sample else 0.0)


def kept(measured: Sequence[PointCost]) -> Sequence[PointCost]:
    """Returns what of the history the models are given, in its order."""
    if len(measured) <= _BEST_KEPT + LATEST_KEPT:
        return measured
    ranked = sorted(range(len(measured)), key=lambda place: measured[place].cost)
    latest = range(len(measured) - LATEST_KEPT, len(measured))
    return [measured[place] for place in sorted({*ranked[:_BEST_KEPT], *latest})]


def answers(measured: Sequence[PointCost], failed: Container[Point]) -> list[PossibleAnswer]:
    """Returns the trials that may be the answer: what has failed another time is none."""
    return [each for each in kept(measured) if isinstance(each, PossibleAnswer) and each.point not in failed]


def _step_seconds(result: TrialResult) -> float | None:
    return median(result.step_times) if result.step_times else None


def _samples(candidate: Candidate) -> int:
    return candidate.micro_batch_size * candidate.gradient_accumulation_steps
