"""Whether a program calls backward more than once for one step of its engine.

It accumulates by hand then, or adds the gradients of several losses, as the discriminator of a GAN does. DeepSpeed's
ZeRO stages 0 and 3 add such gradients up. At stages 1 and 2 each backward pass that ends an accumulation puts its
gradients in the place of those before it (`runtime/zero/stage_1_and_2.py`, seen with DeepSpeed 0.19.8): the same code
trains on the last of them alone.
"""

from collections.abc import Callable
from typing import Any


class BackwardPasses:
    """Counts the backward passes of an engine that end an accumulation, from one call of its `step` to the next.

    Those within an accumulation are the engine's own matter: it is told that more follow, by its count or by
    `set_gradient_accumulation_boundary`, as Accelerate does.

    Args:
        engine: whose passes they are.
        repeated: called at the second of them before a step.
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
        """Starts anew: the engine takes a step."""
        self._since_step = 0
