"""The losses of the first optimizer steps: enough to see whether two configurations train alike."""

import itertools
import math
from typing import Any

import torch

from trial_lib.measure.over_ranks import total

_MOST = 16


class StepLosses:
    """The mean loss of each of the first optimizer steps of this rank, still on its device."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor | None) -> None:
        """Takes up the loss of the next step; None where the code shows none."""
        if loss is not None and len(self._losses) < _MOST:
            self._losses.append(loss)

    def keep(self, count: int) -> None:
        """Leaves out the steps after the first so many: other ranks have no more."""
        del self._losses[count:]

    def means(self, engine: Any) -> list[float]:
        """Returns the mean over all ranks of each, up to the first that is not finite. Every rank takes part."""
        own = [float(loss) for loss in self._losses]
        missing = [0.0] * (_MOST - len(own))
        # Of one length on every rank, whatever each has seen.
        summed = total([*own, *missing, *(1.0 for _ in own), *missing], engine)
        means = [loss / count for loss, count in zip(summed[:_MOST], summed[_MOST:], strict=True) if count]
        return list(itertools.takewhile(math.isfinite, means))
