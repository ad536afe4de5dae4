"""The losses of the first optimizer steps, which show whether two configurations train alike.

The loss of a step is the sum of the losses that its backward passes reduce. The step's gradient is the gradient of this
sum, so two configurations that train alike have equal sums. DeepSpeed divides each loss by the accumulation, unless the
caller has done so (`scale_wrt_gas=False`). transformers' Trainer divides itself if the loss is not a mean over the
whole batch already. A program that divides once too often, or not at all, has gradients that change with the
accumulation. Its losses change as much, and `study/loss_agreement` looks for that.
"""

import itertools
import math
from typing import Any

import torch

from trial_lib.measure.figures.initial_weights import InitialWeights
from trial_lib.measure.figures.over_ranks import total

_MOST = 16


class StepLosses:
    """The loss of each of the first optimizer steps of this rank, still on its device."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._applied: list[bool] = []
        self._weights: InitialWeights | None = None

    def begin(self, engine: Any) -> None:
        """Records the weights of an engine that has not trained."""
        self._weights = InitialWeights(engine)

    def add(self, loss: torch.Tensor | None, applied: bool = True) -> None:
        """Adds the loss of the next step; None if the code shows none.

        Args:
            loss: of the step.
            applied: whether it has changed the weights; fp16's loss scaling skips some.
        """
        if loss is not None and len(self._losses) < _MOST:
            self._losses.append(loss)
            self._applied.append(applied)

    def keep(self, count: int) -> None:
        """Keeps only the first steps, because other ranks have no more."""
        del self._losses[count:], self._applied[count:]

    def over_ranks(self, engine: Any) -> dict[str, list[float] | list[int]]:
        """Returns the losses and the initial weights for the trial's record. Every rank takes part."""
        weights = [] if self._weights is None else self._weights.over_ranks(engine)
        # Ranks skip a step together.
        skipped = [number for number, applied in enumerate(self._applied, 1) if not applied]
        return {"losses": self.means(engine), "skipped_steps": skipped, "initial_weights": weights}

    def means(self, engine: Any) -> list[float]:
        """Returns the mean of each loss over all ranks, up to the first that is not finite. Every rank takes part."""
        own = [float(loss) for loss in self._losses]
        missing = [0.0] * (_MOST - len(own))
        # Every rank needs a list of the same length, however many losses it has.
        summed = total([*own, *missing, *(1.0 for _ in own), *missing], engine)
        means = [loss / count for loss, count in zip(summed[:_MOST], summed[_MOST:], strict=True) if count]
        return list(itertools.takewhile(math.isfinite, means))
