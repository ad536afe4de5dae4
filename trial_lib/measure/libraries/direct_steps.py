"""A program that steps DeepSpeed's optimizer itself, and not the engine."""

import types
from typing import Any

from trial_lib.wire.errors import InputError

# After so many the engine must have counted one.
_ENOUGH = 3


def refuse_direct_steps(engine: Any) -> None:
    """Ends a program that steps the optimizer of an engine itself, because such a training has no step to measure.

    The engine counts its steps, and knows by them where an accumulation ends.

    Args:
        engine: a new one.
    """
    optimizer = getattr(engine, "optimizer", None)
    original = getattr(optimizer, "step", None)
    if original is None:
        return
    steps = 0

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the optimizer's `step`, which the engine calls as well."""
        nonlocal steps
        steps += 1
        if steps >= _ENOUGH and engine.global_steps == 0:
            raise InputError(
                "The program steps the optimizer that DeepSpeed has returned, and not the engine. DeepSpeed then "
                "counts no step, and ends no accumulation.",
                where="optimizer.step",
                remedy="Call `engine.step()` in its place, after each `engine.backward(loss)`.",
            )
        return original(*args, **kwargs)

    # A method, because a schedule of the learning rate that follows the optimizer takes it for one.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[union-attr]
