"""What `adaptive` remembers of its trials."""

from collections.abc import Sequence
from dataclasses import dataclass

from trial_lib.experiment.candidate import Candidate
from trial_lib.experiment.result import TrialResult
from trial_lib.search.cost_model import Point

# What the models are given of a long history: the best and the latest.
_BEST_KEPT, LATEST_KEPT = 120, 80


@dataclass(frozen=True)
class Measured:
    """A trial that tells what a point costs; `result` is None where it was stopped before its metric was known."""

    point: Point
    cost: float
    candidate: Candidate
    result: TrialResult | None


@dataclass(frozen=True)
class InFlight:
    """A candidate that runs: where it stands in the space, and the number of the ask that it came with."""

    point: Point | None
    ask: int


def kept(measured: Sequence[Measured]) -> Sequence[Measured]:
    """Returns what of the history the models are given, in its order."""
    if len(measured) <= _BEST_KEPT + LATEST_KEPT:
        return measured
    ranked = sorted(range(len(measured)), key=lambda place: measured[place].cost)
    latest = range(len(measured) - LATEST_KEPT, len(measured))
    return [measured[place] for place in sorted({*ranked[:_BEST_KEPT], *latest})]
