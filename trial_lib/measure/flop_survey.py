"""The optimizer step of a profile trial that counts the FLOPs of a micro-batch."""

from collections.abc import Callable
from typing import Any

from trial_lib.flops.compiled_programs import can_run_eagerly
from trial_lib.measure.engine_watch import EngineWatch


class FlopSurvey:
    """Counts the FLOPs of one micro-batch, after the rest of a profile.

    A compiled function does not show its operators, so this micro-batch runs as its code is written. Its memory and its
    time are not the training's. It may even not fit: only compiled attention goes without its square of scores, for
    example. The program has compiled its functions by then, and uses them again afterwards.

    Args:
        watch: of the engine that trains.
        most: returns the largest of each value over all ranks; each of them calls it.
        about_to_count: called before the code trains on. It saves the results so far, because nothing may be added to
            them.
    """

    def __init__(
        self,
        watch: EngineWatch,
        most: Callable[[list[float]], list[float]],
        about_to_count: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._most = most
        self._about_to_count = about_to_count
        self._steps_left: int | None = None

    def step_ended(self, holds_other_batches: bool) -> bool:
        """Returns whether the code has to train on. Every rank calls it after the same optimizer steps.

        Args:
            holds_other_batches: whether the code may still hold a stretched batch.
        """
        if self._steps_left is None:
            (cannot_count,) = self._most([float(not _can_count(self._watch.engine))])
            if cannot_count:
                return False
            self._about_to_count()
            self._steps_left = 2 if holds_other_batches else 1
        else:
            self._steps_left -= 1
        if self._steps_left == 1:
            self._watch.model.count_flops()
        return self._steps_left > 0


def _can_count(engine: Any) -> bool:
    # Under DeepCompile the compiled graph reduces the gradients. Code that runs as written would train nothing.
    is_deep = getattr(engine, "is_deepcompile_active", lambda: False)
    return can_run_eagerly() and not is_deep()
