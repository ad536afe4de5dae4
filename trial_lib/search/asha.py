"""dsat's `asha`: asynchronous successive halving (arXiv 1810.05934) over lineages.

The resource that successive halving gives out is trials of a lineage's binary search.
"""

from bisect import bisect_left, insort
from heapq import heappop, heappush

from trial_lib.search.base import SearchProblem
from trial_lib.search.binary import BinarySearch
from trial_lib.search.lineage import Lineage
from trial_lib.search.settings import AshaSettings


class _Rung:
    """The lineages that have completed a rung, ranked by their best metric until then."""

    def __init__(self) -> None:
        self.completed = 0
        self._ranking: list[tuple[float, int]] = []
        self._not_promoted: list[tuple[tuple[float, int], Lineage]] = []

    def add(self, lineage: Lineage, score: float | None) -> None:
        """Adds a lineage that completed the rung. The smallest score ranks first; None (no metric) does not rank."""
        rank = (score, self.completed) if score is not None else None
        self.completed += 1
        if rank is not None:
            insort(self._ranking, rank)  # moves a few kilobytes at most, so it is cheaper than a tree
            heappush(self._not_promoted, (rank, lineage))

    def best_not_promoted(self, level: int, among_first: int) -> Lineage | None:
        """Returns the best lineage still on the rung `level`, if its rank is high enough."""
        while self._not_promoted and self._not_promoted[0][1].rung > level:
            heappop(self._not_promoted)
        if not self._not_promoted:
            return None
        rank, lineage = self._not_promoted[0]
        return lineage if bisect_left(self._ranking, rank) < among_first else None


class AshaSearch(BinarySearch):
    """Gives each lineage few trials. The best 1 / divisor of those with equally many trials get more.

    When no unused lineage is left and the rule would leave places empty, the best unpromoted lineage is promoted.
    """

    def __init__(self, settings: AshaSettings, problem: SearchProblem) -> None:
        """Starts with nothing asked for."""
        super().__init__(settings, problem)
        self._divisor = settings.divisor
        self._trials_of_rung = [
            settings.min_binary_search_trials * settings.divisor ** (settings.asha_early_stopping + rung)
            for rung in range(settings.max_rungs)
        ]
        self._rungs = [_Rung() for _ in range(settings.max_rungs)]

    def _priority(self, lineage: Lineage) -> tuple[int, ...]:
        return -lineage.rung, -lineage.trials

    def _continue(self, lineage: Lineage) -> None:
        if not self._has_completed_rung(lineage):
            self._wait(lineage)
            return
        self._enter(lineage)
        promoted = self._promote()
        if promoted is not None:
            self._wait(promoted)

    def _has_completed_rung(self, lineage: Lineage) -> bool:
        return lineage.trials >= self._trials_of_rung[lineage.rung] or not lineage.has_sizes_left

    def _enter(self, lineage: Lineage) -> None:
        score = lineage.best
        if score is not None and not self.metric.smaller_is_better:
            score = -score
        self._rungs[lineage.rung].add(lineage, score)

    def _promote(self) -> Lineage | None:
        """Promotes the best eligible lineage, and returns it.

        A lineage without a size left completes the rung above at once, and the next one is promoted.
        """
        while (lineage := self._promotable()) is not None:
            lineage.rung += 1
            if not self._has_completed_rung(lineage):
                return lineage
            self._enter(lineage)
        return None

    def _promotable(self) -> Lineage | None:
        below_the_top = list(enumerate(self._rungs))[-2::-1]
        for level, rung in below_the_top:
            lineage = rung.best_not_promoted(level, among_first=rung.completed // self._divisor)
            if lineage is not None:
                return lineage
        if self._every_lineage_was_used:
            for level, rung in below_the_top:
                lineage = rung.best_not_promoted(level, among_first=rung.completed)
                if lineage is not None:
                    return lineage
        return None
