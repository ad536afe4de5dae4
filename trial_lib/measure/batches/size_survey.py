"""Surveys, in a run of the program as typed, whether its micro-batches differ in size."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trial_lib.measure.batches.loader_batches import loader_batches
from trial_lib.measure.engine_watch import EngineWatch
from trial_lib.measure.program_facts import ProgramFacts
from trial_lib.wire.arrival import Arrival

# Enough micro-batches to decide, and the time to wait for them.
_ENOUGH, _SECONDS = 8, 10.0
_NONE = 2**62


class SizeSurvey:
    """Looks at the first micro-batches of a program.

    One is enough if a data loader of a fixed batch size gives it, with as many rows as the engine expects. Several are
    needed for batches that are made in another way, such as by a budget of tokens.

    Args:
        watch: of the engine that trains.
        facts: collect the findings.
        most: returns the largest of each value over all ranks; each of them calls it.
    """

    def __init__(self, watch: EngineWatch, facts: ProgramFacts, most: Callable[[list[float]], list[float]]) -> None:
        self._watch = watch
        self._facts = facts
        self._most = most
        self._ends_at = time.monotonic() + _SECONDS

    def step_ended(self) -> bool:
        """Returns whether the code has to train on. Every rank calls it after the same optimizer steps."""
        (is_open,) = self._most([float(not self._is_seen())])
        return bool(is_open)

    def _is_seen(self) -> bool:
        rows = self._watch.rows
        if not rows or len(rows) >= _ENOUGH or time.monotonic() > self._ends_at:
            return True
        return loader_batches.has_fixed_size and set(rows) == {self._watch.asked}

    def conclude(self) -> None:
        """Records which dimension has the rows, and whether they vary. Every rank takes part.

        If the rows vary, each row is a sample.

        A second dimension that differs between batches, or between ranks, is a length.
        """
        watch = self._watch
        first, second = ([each[axis] for each in watch.sizes if axis < len(each)] for axis in (0, 1))
        figures = self._most([*_figures(first), *_figures(second)])
        first_varies, second_varies = _differ(*figures[:3]), _differ(*figures[3:])
        rows_vary, largest_second = first_varies, figures[4]
        arrival = watch.arrival
        if second_varies and watch.sizes:
            arrival = Arrival.of_typed(watch.asked, watch.sizes[0][:1], arrival.typed_tokens)
        elif first_varies and largest_second == watch.asked:
            # The second dimension is constant, and as large as the micro-batch. It has the rows, and the first one is
            # the length.
            arrival = replace(arrival, rows_per_sample=1, dimension=1, other_rows_per_sample=0)
            rows_vary = False
        if rows_vary:
            arrival = replace(arrival, rows_per_sample=1, varies=True, other_rows_per_sample=0)
        watch.arrival, self._facts.batch_varies = arrival, rows_vary
        self._facts.note_arrival(watch.arrival)
        watch.first_micro_batch = round(watch.arrival.samples(watch.rows[0], watch.asked)) if watch.rows else None


def _figures(sizes: Sequence[int]) -> list[float]:
    """Returns the sizes of all ranks that show whether they differ. A rank without a batch changes nothing."""
    largest = max(sizes, default=0)
    return [float(vary(sizes)), float(largest), -float(largest or _NONE)]


def _differ(unsteady: float, top: float, negative_top: float) -> bool:
    return bool(unsteady) or (top > 0 and -negative_top < _NONE and top != -negative_top)


def vary(rows: Sequence[int]) -> bool:
    """Returns whether sizes vary. A smaller last batch of the data does not count.

    Args:
        rows: of each micro-batch, in order.
    """
    return rows.count(max(rows)) < len(rows) / 2 if rows else False
