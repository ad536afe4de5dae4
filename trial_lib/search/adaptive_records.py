"""What `adaptive` remembers of its trials."""

from dataclasses import dataclass

from trial_lib.experiment.candidate import Candidate
from trial_lib.experiment.result import TrialResult
from trial_lib.search.cost_model import Point


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
