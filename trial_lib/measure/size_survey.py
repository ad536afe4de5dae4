"""Whether the micro-batches of a program differ in size, seen while it runs as it was typed."""

import time
from collections.abc import Callable

from trial_lib.measure.engine_watch import EngineWatch
from trial_lib.measure.loader_batches import loader_batches
from trial_lib.measure.program_facts import ProgramFacts

# Micro-batches that tell, and for how long they are waited for.
_ENOUGH, _SECONDS = 8, 10.0


class SizeSurvey:
    """Looks at the first micro-batches of a program.

    One will do where a data loader of a fixed batch size gives it, and it has as many rows as the engine expects.
    Batches made in another way, such as by a budget of tokens, are looked at until several have come.

    Args:
        watch: of the engine that trains.
        facts: take up what is found.
        most: returns the largest of each value over all ranks; each of them calls it.
    """

    def __init__(self, watch: EngineWatch, facts: ProgramFacts, most: Callable[[list[float]], list[float]]) -> None:
        self._watch = watch
        self._facts = facts
        self._most = most
        self._ends_at = time.monotonic() + _SECONDS

    def step_ended(self) -> bool:
        """Returns whether the code is to train on; every rank asks after the same optimizer steps."""
        (is_open,) = self._most([float(not self._is_seen())])
        return bool(is_open)

    def _is_seen(self) -> bool:
        rows = self._watch.rows
        if not rows or len(rows) >= _ENOUGH or time.monotonic() > self._ends_at:
            return True
        return loader_batches.has_fixed_size and set(rows) == {self._watch.asked}

    def conclude(self) -> None:
        """Takes up whether the sizes vary, on any rank or from rank to rank. Every rank takes part."""
        rows = self._watch.rows
        largest = max(rows, default=0)
        unsteady, top, negative_top = self._most([float(vary(rows)), float(largest), -float(largest or 2**62)])
        # A stage of a pipeline that sees no batch has none to differ in.
        self._facts.batch_varies = bool(unsteady) or (top > 0 and -negative_top < 2**62 and top != -negative_top)


def vary(rows: list[int]) -> bool:
    """Returns whether sizes vary, but for a last batch of the data that is smaller than the others.

    Args:
        rows: of each micro-batch, in order.
    """
    return rows.count(max(rows)) < len(rows) / 2 if rows else False
