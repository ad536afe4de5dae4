"""The step time of a program that waits for the workers of a data loader. Pure functions.

Workers make batches side by side, so these come in bursts: a step waits, and the next ones find theirs ready. The
median of some steps is then a long step or a short one, and training pays neither. It pays the mean of a whole cycle,
in which each worker brings as many batches as the others.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# With a smaller share of waiting, the median is off by no more than this share.
_LEAST_SHARE = 0.1
# A cycle of more steps would take too long to measure.
_LONGEST = 32


def share_of_wait(steps: Sequence[tuple[float, float]]) -> float:
    """Returns the share of the time of some steps for which the code has waited for batches.

    Args:
        steps: of each, the seconds of waiting and of the whole step.
    """
    whole = sum(seconds for _, seconds in steps)
    return sum(waited for waited, _ in steps) / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class WorkerCycle:
    """The cycle of a loader's workers in some counted steps.

    Attributes:
        length: of the cycle in steps; 1 if the program does not wait for workers.
        phases: where each counted step is in its cycle, as `StepLoading.phase` has it. Empty if `length` is 1.
    """

    length: int = 1
    phases: tuple[float, ...] = ()

    @classmethod
    def of(cls, phases: Sequence[float], length: int, share: float) -> "WorkerCycle":
        """Returns the cycle of counted steps.

        Args:
            phases: of each step.
            length: of the cycle in steps.
            share: of the steps' time for which the program waits for batches.
        """
        if share < _LEAST_SHARE or not 1 < length <= _LONGEST:
            return cls()
        # An epoch of a single step has no others.
        return cls(length, tuple(phases) if any(map(_is_in_cycle, phases)) else (0.0,) * len(phases))

    @property
    def missing(self) -> int:
        """Steps of the cycle that none of the counted ones stands for."""
        return max(0, self.length - len(set(filter(_is_in_cycle, self.phases)))) if self.length > 1 else 0

    @property
    def is_covered(self) -> bool:
        """Whether some counted step stands for each step of the cycle, or enough steps have been tried."""
        return not self.missing or len(self.phases) >= 2 * _LONGEST

    def step_time(self, step_times: Sequence[float]) -> float:
        """Returns the seconds of a step, as training pays them.

        Args:
            step_times: of the counted steps.
        """
        if self.length == 1:
            return statistics.median(step_times)
        of_phases: dict[float, list[float]] = {}
        for phase, seconds in zip(self.phases, step_times, strict=True):
            if _is_in_cycle(phase):
                of_phases.setdefault(phase, []).append(seconds)
        # Counted steps seldom are whole cycles, so each step of the cycle has the same weight.
        return statistics.fmean(statistics.fmean(times) for times in of_phases.values())


def _is_in_cycle(phase: float) -> bool:
    return 0 <= phase < math.inf
