"""The optimizer steps that a trial measures. A rank imports this module: standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepWindow:
    """The optimizer steps that a trial measures.

    Attributes:
        start_step: the first that counts, from 1; those before it warm up.
        end_step: steps up to this one are always measured.
        max_steps: counted steps after which the measurement ends whatever its error.
        max_seconds: counted seconds after which it ends as well, once `end_step` is reached. Where a machine is
            unsteady more of them buy little: readings differ from process to process by more than within one.
        relative_error: the relative standard error of the mean step time that is good enough.
    """

    start_step: int = 3
    end_step: int = 5
    max_steps: int = 40
    max_seconds: float = 1.0
    relative_error: float = 0.02

    @property
    def min_steps(self) -> int:
        """Counted steps before the first decision."""
        return self.end_step - self.start_step + 1
