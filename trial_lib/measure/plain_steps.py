"""Optimizer steps that a program takes by plain torch, before it has a DeepSpeed engine."""

import os
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

# A program may warm something up so, but not for that many steps.
_MOST = 100


class PlainSteps:
    """Ends a trial that trains without DeepSpeed. Otherwise it would run until its deadline.

    Args:
        refuse: ends the trial, with an outcome and a reason.
    """

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        self._refuse = refuse
        self._taken = 0
        # A child that the program forks has a copy of this object, but is not the rank.
        self._process = os.getpid()

    def begin(self) -> None:
        """Counts from now on."""
        self._hook = register_optimizer_step_post_hook(self._step_ended)

    def end(self) -> None:
        """Stops counting, because the engine exists."""
        self._hook.remove()

    def _step_ended(self, *_: Any) -> None:
        self._taken += 1
        if self._taken == _MOST and os.getpid() == self._process:
            self._refuse(
                "invalid",
                f"The program has taken {_MOST} optimizer steps without a DeepSpeed engine. It trains without "
                "DeepSpeed. Let it call deepspeed.initialize, or give it the argument that turns DeepSpeed on.",
            )
