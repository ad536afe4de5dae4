"""Finds out that an engine never trains: its optimizer steps are skipped, one after another."""

import torch

NOT_FINITE = "The loss was not finite. A smaller learning rate or fp32 may help."
"""The reason of a trial whose loss was infinite or no number."""

# Dynamic loss scaling halves its scale some dozen times before it fits. More skipped steps are no search for a scale.
_MOST_IN_A_ROW = 100


class SkippedInARow:
    """Counts the optimizer steps that DeepSpeed has skipped one after another.

    DeepSpeed skips a step whose gradients are not finite.
    """

    def __init__(self) -> None:
        self._count = 0

    def reason_after(self, applied: bool, loss: torch.Tensor | None) -> str:
        """Counts a step, and returns why the training has diverged; empty if it may go on.

        Args:
            applied: whether the step was not skipped.
            loss: of the step. None if the code shows none.
        """
        self._count = 0 if applied else self._count + 1
        if applied:
            return ""
        if loss is not None and not bool(torch.isfinite(loss).all()):
            return NOT_FINITE
        if self._count < _MOST_IN_A_ROW:
            return ""
        skipped = f"{_MOST_IN_A_ROW} optimizer steps in a row were skipped"
        return f"{skipped}, because their gradients were not finite."
