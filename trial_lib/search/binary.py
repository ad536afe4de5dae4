"""dsat's `binary`: random lineages, each with a binary search for the largest micro-batch size that runs."""

import random

from trial_lib.search.base import SearchProblem
from trial_lib.search.lineage import Lineage
from trial_lib.search.lineage_search import LineageSearch
from trial_lib.search.settings import BinarySettings


class BinarySearch(LineageSearch):
    """Tries the middle of a lineage's range. A size that runs raises the lower end, and one that fails lowers the upper
    end.

    A lineage without a size left gives its place to a new random one.
    """

    def __init__(self, settings: BinarySettings, problem: SearchProblem) -> None:
        """Starts with nothing asked for."""
        super().__init__(settings, problem)
        self._range_factor = settings.search_range_factor

    def _first_range(self, stage: int) -> tuple[int, int]:
        return 1, max(1, int(self._first_guess[stage] * self._range_factor))

    def _choose_size(self, lineage: Lineage, rng: random.Random) -> int:
        return (lineage.lo + lineage.hi) // 2

    def _continue(self, lineage: Lineage) -> None:
        if lineage.has_sizes_left:
            self._wait(lineage)
