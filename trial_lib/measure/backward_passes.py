"""Detects a program that calls backward more than once for one step of its engine.

Such a program accumulates by hand, or adds the gradients of several losses, as the discriminator of a GAN does.
DeepSpeed's ZeRO stages 0 and 3 add such gradients up. At stages 1 and 2, each backward pass that ends an accumulation
replaces the gradients of the passes before it. The same code then trains on the last gradients alone
(`runtime/zero/stage_1_and_2.py`, seen with DeepSpeed 0.19.8).
"""

from collections.abc import Callable
from typing import Any


class BackwardPasses:
    """Counts the backward passes of an engine that end an accumulation, from one call of its `step` to the next.

    Passes within an accumulation do not count. The engine finds them by its own count, or by
    `set_gradient_accumulation_boundary`, which Accelerate calls.

    Args:
        engine: runs the passes.
        repeated: called at the second such pass before a step.
    """

    def __init__(self, engine: Any, repeated: Callable[[], None]) -> None:
        self._engine = engine
        self._repeated = repeated
        self._since_step = 0

    def begin(self) -> None:
        """Counts a backward pass that is about to begin."""
        is_inside_no_sync = getattr(self._engine, "inside_no_sync_ctxt", False)
        if is_inside_no_sync or not self._engine.is_gradient_accumulation_boundary():
            return
        self._since_step += 1
        if self._since_step == 2:
            self._repeated()

    def end(self) -> None:
        """Resets the count, because the engine takes a step."""
        self._since_step = 0
