"""The losses of the first optimizer steps: enough to see whether two configurations train alike.

The loss of a step is the sum of what its backward passes make smaller: the step's gradient is that of this sum, so two
configurations that train alike have it alike. DeepSpeed divides each loss by the accumulation, unless it is told that
the caller has done so (`scale_wrt_gas=False`, as transformers' Trainer does, which divides where the loss is no mean
over the whole batch already). A program that divides once too often, or not at all, has gradients that change with the
accumulation, and losses that do so as much: `study/loss_agreement` looks for that.
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
        """Notes the weights of an engine that has not trained."""
        self._weights = InitialWeights(engine)

    def add(self, loss: torch.Tensor | None, applied: bool = True) -> None:
        """Takes up the loss of the next step; None where the code shows none.

        Args:
            loss: of the step.
            applied: whether it has changed the weights; fp16's loss scaling skips some.
        """
        if loss is not None and len(self._losses) < _MOST:
            self._losses.append(loss)
            self._applied.append(applied)

    def keep(self, count: int) -> None:
        """Leaves out the steps after the first so many: other ranks have no more."""
        del self._losses[count:], self._applied[count:]

    def over_ranks(self, engine: Any) -> dict[str, list[float] | list[int]]:
        """Returns what a trial's record has of the losses and of the initial weights. Every rank takes part."""
        weights = [] if self._weights is None else self._weights.over_ranks(engine)
        # Ranks skip a step together.
        skipped = [number for number, applied in enumerate(self._applied, 1) if not applied]
        return {"losses": self.means(engine), "skipped_steps": skipped, "initial_weights": weights}

    def means(self, engine: Any) -> list[float]:
        """Returns the mean over all ranks of each, up to the first that is not finite. Every rank takes part."""
        own = [float(loss) for loss in self._losses]
        missing = [0.0] * (_MOST - len(own))
        # Of one length on every rank, whatever each has seen.
        summed = total([*own, *missing, *(1.0 for _ in own), *missing], engine)
        means = [loss / count for loss, count in zip(summed[:_MOST], summed[_MOST:], strict=True) if count]
        return list(itertools.takewhile(math.isfinite, means))
