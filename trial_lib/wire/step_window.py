"""The optimizer steps that a trial measures.

A rank imports this module, so it needs only the standard library.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepWindow:
    """The optimizer steps that a trial measures.

    Attributes:
        start_step: the first that counts, from 1. The steps before it warm up.
        end_step: steps up to this one are always measured.
        max_steps: counted steps after which the measurement ends, whatever its error. A program that waits for loader
            workers goes on until their cycle is covered.
        max_seconds: counted seconds after which it ends as well, once `end_step` is reached. A program that waits for
            loader workers gets more, for a whole cycle of theirs. On a noisy machine more seconds help little, because
            readings differ more between processes than within one. A trial also takes about a second to start, so
            longer windows tell less in a given time.
        relative_error: a relative standard error of the mean step time that is small enough.
    """

    start_step: int = 3
    end_step: int = 5
    max_steps: int = 40
    max_seconds: float = 0.5
    relative_error: float = 0.02

    @property
    def min_steps(self) -> int:
        """Counted steps before the first decision."""
        return self.end_step - self.start_step + 1
