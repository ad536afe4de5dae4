"""Finds the largest and the fastest micro-batch size of one configuration. All other knobs stay as they are."""

import itertools
from collections.abc import Iterator

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.base import Search, SearchProblem
from zerotune.trial_lib.search.methods import SearchSettings

# A size between two neighbours is not worth a trial if they differ by less than one part in so many. The first number
# is for the fastest size, the second for the largest.
_FAST_ENOUGH, _LARGE_ENOUGH = 8, 32


class MicroBatchSearch(Search):
    """Doubles the size until one does not fit, narrows the largest down, and looks around the fastest.

    A size that fails (out of memory, refused, too slow to end) bounds all larger ones, whatever the reason, because a
    data set can be too small as well. The largest is exact for small sizes, and within the gap of `_LARGE_ENOUGH`
    above. Sizes around the fastest are measured until its neighbours are within the gap of `_FAST_ENOUGH`.

    If trials run side by side, sizes are doubled, and gaps divided, ahead of their results.
    """

    def __init__(self, settings: SearchSettings, problem: SearchProblem) -> None:
        super().__init__(settings, problem)
        self._values: dict[int, float] = {}
        self._smallest_failed: int | None = None

    def _learn(self, candidate: Candidate, result: TrialResult) -> None:
        size, value = candidate.micro_batch_size, self._value(result)
        if value is not None:
            self._values[size] = value
            self._is_new_best(candidate, result, value)
        elif result.outcome is not Outcome.COMPLETED:
            self._smallest_failed = min(size, self._smallest_failed or size)

    def _propose(self) -> Candidate | None:
        known = self._running | self._values.keys()
        wanted = (self._with_own_accumulation({}, size) for size in self._wanted() if size not in known)
        return next(wanted, None)

    @property
    def _running(self) -> set[int]:
        return {size for _, size in self._in_flight}

    def _wanted(self) -> Iterator[int]:
        asked = sorted(self._running | self._values.keys())
        failed = self._smallest_failed
        if failed is None:
            size = self._allowed(2 * asked[-1]) if asked else 1
            if size not in asked:
                yield size
            elif not self._in_flight:
                yield from self._around_fastest()
            return
        largest = max((size for size in self._values if size < failed), default=0)
        # Sizes in flight divide the gap, because their results will narrow it.
        marks = sorted({largest, failed, *(size for size in self._running if largest < size < failed)})
        low, high = max(itertools.pairwise(marks), key=lambda gap: gap[1] - gap[0])
        if high - low > max(1, low // _LARGE_ENOUGH):
            yield (low + high) // 2
        elif not self._in_flight:
            yield from self._around_fastest()

    def _around_fastest(self) -> Iterator[int]:
        if not self._values:
            return
        sizes = sorted(self._values)
        fastest = max(sizes, key=lambda size: self._values[size] * (-1 if self.metric.smaller_is_better else 1))
        place = sizes.index(fastest)
        for low, high in zip(sizes[max(0, place - 1) : place + 1], sizes[max(1, place) : place + 2], strict=False):
            if high - low > max(1, fastest // _FAST_ENOUGH):
                yield (low + high) // 2
