"""The records that `adaptive` keeps of its trials."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import log
from statistics import median

from trial_lib.records.candidate import Candidate
from trial_lib.records.result import TrialResult
from trial_lib.search.cost_model import Point

# The models get the best and the latest trials of a long history.
_BEST_KEPT, LATEST_KEPT = 120, 80
# The assumed extra cost of a trial that was stopped as too slow before any of its steps was timed.
_TOO_SLOW = log(1.1)


@dataclass(frozen=True)
class PointCost:
    """The cost of a point, from a trial.

    Attributes:
        point: the candidate's place in the space.
        cost: logarithm of the quantity that the search minimises.
        candidate: the candidate that ran.
        step: seconds of an optimizer step (median). None if none was timed.
    """

    point: Point
    cost: float
    candidate: Candidate
    step: float | None


@dataclass(frozen=True)
class PossibleAnswer(PointCost):
    """A completed trial that the search asked for. Its candidate may be the answer."""

    result: TrialResult


@dataclass(frozen=True)
class InFlight:
    """A running candidate: its place in the space, and the number of its ask."""

    point: Point | None
    ask: int


def completed(point: Point, candidate: Candidate, cost: float, result: TrialResult, asked: bool) -> PointCost:
    """Returns the record of a completed trial. It may be the answer if the search asked for it."""
    step = _step_seconds(result)
    return PossibleAnswer(point, cost, candidate, step, result) if asked else PointCost(point, cost, candidate, step)


def stopped(
    measured: Sequence[PointCost], point: Point, candidate: Candidate, result: TrialResult, by_sample: bool
) -> PointCost:
    """Returns the record of a trial that was stopped because it could not win; see `stopped_cost`."""
    cost = stopped_cost(measured, candidate, result, by_sample)
    return PointCost(point, cost, candidate, _step_seconds(result))


def stopped_cost(measured: Sequence[PointCost], candidate: Candidate, result: TrialResult, by_sample: bool) -> float:
    """Returns the cost of a trial that was stopped because it could not win, by the steps that it made.

    Its steps are compared with those of a trial that was measured to its end. The cost then holds for any metric,
    however lucky the reading to beat was.

    Args:
        measured: the known costs, at least one.
        candidate: the candidate that ran.
        result: how it ended.
        by_sample: whether the cost is that of a sample, not of a step.
    """
    step = _step_seconds(result)
    # The steps of an earlier study's trials are unknown.
    timed = [(each.cost, each.step, _samples(each.candidate)) for each in measured if each.step is not None]
    if step is None or not timed:
        return min(each.cost for each in measured) + _TOO_SLOW
    best_cost, best_step, best_samples = min(timed)
    return best_cost + log(step / best_step) - (log(_samples(candidate) / best_samples) if by_sample else 0.0)


def kept(measured: Sequence[PointCost]) -> Sequence[PointCost]:
    """Returns the part of the history for the models, in its order."""
    if len(measured) <= _BEST_KEPT + LATEST_KEPT:
        return measured
    ranked = sorted(range(len(measured)), key=lambda place: measured[place].cost)
    latest = range(len(measured) - LATEST_KEPT, len(measured))
    return [measured[place] for place in sorted({*ranked[:_BEST_KEPT], *latest})]


def answers(measured: Sequence[PointCost], failed: Container[Point]) -> list[PossibleAnswer]:
    """Returns the trials that may be the answer. A point that failed another time may not."""
    return [each for each in kept(measured) if isinstance(each, PossibleAnswer) and each.point not in failed]


def _step_seconds(result: TrialResult) -> float | None:
    return median(result.step_times) if result.step_times else None


def _samples(candidate: Candidate) -> int:
    return candidate.micro_batch_size * candidate.gradient_accumulation_steps
