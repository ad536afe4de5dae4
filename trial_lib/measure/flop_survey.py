"""The optimizer step of a profile trial in which the FLOPs of a micro-batch are counted."""

from collections.abc import Callable
from typing import Any

from trial_lib.flops.compiled_programs import can_run_eagerly
from trial_lib.measure.engine_watch import EngineWatch


class FlopSurvey:
    """Has the FLOPs of one micro-batch counted, once all else of a profile is known.

    That micro-batch runs as its code is written, for a compiled function does not show what it does. So its memory and
    its time are not the training's, and it may even not fit: attention that is only compiled without its square of
    scores, say. What the program compiles has been compiled by then, and is used again afterwards.

    Args:
        watch: of the engine that trains.
        most: returns the largest of each value over all ranks; each of them calls it.
        about_to_count: called before the code trains on: what is known must not be lost, and nothing may be added.
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
        """Returns whether the code is to train on; every rank asks after the same optimizer steps.

        Args:
            holds_other_batches: whether the code may still hold a batch that is not as the data have it.
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
    # Under DeepCompile the gradients are reduced by the compiled graph: run as it is written the code trains nothing.
    is_deep = getattr(engine, "is_deepcompile_active", lambda: False)
    return can_run_eagerly() and not is_deep()
