"""A program that steps an optimizer itself, and not DeepSpeed's engine."""

import functools
import types
from typing import Any

from trial_lib.wire.errors import InputError

# By so many steps of an optimizer some engine must have made one.
_ENOUGH = 3
_WATCHED = "zerotune_watched"


class DirectSteps:
    """Ends a program whose optimizers are stepped by itself alone, because such a training has no step to measure.

    An engine counts its steps, and knows by them where an accumulation ends.
    """

    def __init__(self) -> None:
        self._of_engines = self._others = self._depth = 0

    def watch(self, engine: Any) -> None:
        """Watches the steps of an engine and of its optimizers.

        Args:
            engine: a new one.
        """
        if not hasattr(engine, "_take_model_step"):
            return
        self._follow(engine)
        for name in ("optimizer", "basic_optimizer"):
            optimizer: Any = getattr(engine, name, None)
            # Several engines may have one optimizer.
            if hasattr(optimizer, "step") and not getattr(optimizer.step, _WATCHED, False):
                self._follow_optimizer(optimizer)

    def _follow(self, engine: Any) -> None:
        original = engine._take_model_step

        @functools.wraps(original)
        def take_model_step(*args: Any, **kwargs: Any) -> Any:
            self._of_engines += 1
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        engine._take_model_step = take_model_step

    def _follow_optimizer(self, optimizer: Any) -> None:
        original = optimizer.step

        # With the marks of a schedule of the learning rate that follows the optimizer already.
        @functools.wraps(original)
        def step(itself: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._depth and not self._of_engines:
                self._others += 1
                if self._others >= _ENOUGH:
                    raise InputError(
                        "The program steps its optimizer, and not DeepSpeed's engine. DeepSpeed then counts no step, "
                        "and ends no accumulation.",
                        where="optimizer.step",
                        remedy="Call `engine.step()` in its place, after each `engine.backward(loss)`.",
                    )
            return original(*args, **kwargs)

        setattr(step, _WATCHED, True)
        # A method, because a schedule that comes later takes it for one.
        optimizer.step = types.MethodType(step, optimizer)
