"""dsat's `random`: random lineages with random sizes. A new lineage starts from its stage's best size."""

import random
from collections.abc import Collection
from math import sqrt

from trial_lib.search.base import SearchProblem
from trial_lib.search.lineage import Lineage, Proposal
from trial_lib.search.lineage_search import LineageSearch
from trial_lib.search.settings import RandomSettings

EXACT_COIN_FLIPS = 4096


class RandomSearch(LineageSearch):
    """Draws sizes from the middle of a lineage's range, and leaves lineages that have little to add.

    The upper end of a range doubles when the lower end passes it, until a size has not fitted. Larger sizes would then
    fail again.
    """

    def __init__(self, settings: RandomSettings, problem: SearchProblem) -> None:
        """Starts with nothing asked for."""
        super().__init__(settings, problem)
        self._trials_per_lineage = settings.trials_per_random_config
        self._early_stopping = settings.early_stopping
        self._trials_since_best = 0
        self._best_of_stage: dict[int, tuple[float, Proposal]] = {}
        self._largest_of_stage: dict[int, int] = {}

    def _first_range(self, stage: int) -> tuple[int, int]:
        if stage not in self._best_of_stage:
            return 1, self._first_guess[stage]
        _, best = self._best_of_stage[stage]
        lo = best.candidate.micro_batch_size + 1
        return lo, max(self._largest_of_stage[stage], best.hi, 2 * lo)

    def _choose_size(self, lineage: Lineage, rng: random.Random) -> int:
        return lineage.lo + _heads(lineage.hi - lineage.lo, rng)

    def _learn(self, proposal: Proposal, value: float | None, is_best: bool) -> None:
        lineage, size = proposal.lineage, proposal.candidate.micro_batch_size
        if value is not None:
            if not lineage.has_sizes_left and not lineage.out_of_memory:
                lineage.hi = self._allowed(2 * lineage.hi)
            stage = lineage.stage
            if stage not in self._best_of_stage or self.metric.better(value, than=self._best_of_stage[stage][0]):
                self._best_of_stage[stage] = value, proposal
            self._largest_of_stage[stage] = max(size, self._largest_of_stage.get(stage, 0))
        if is_best:
            self._trials_since_best = 0
        elif self.best is not None:
            self._trials_since_best += 1
            if self._trials_since_best == self._early_stopping:
                self._stopped = True

    def _continue(self, lineage: Lineage) -> None:
        if not self._is_over(lineage):
            self._wait(lineage)

    def _is_over(self, lineage: Lineage) -> bool:
        return (
            not lineage.has_sizes_left  # it failed at its lower end
            or lineage.trials >= self._trials_per_lineage
            or (lineage.stage == 3 and bool(self._cheaper_stages_that_worked))
            or (lineage.out_of_memory and self._largest_of_stage.get(lineage.stage, 0) >= lineage.hi)
        )

    def _stages_for_new_lineages(self) -> Collection[int]:
        worked = self._cheaper_stages_that_worked
        if not worked:
            return self._space.stages
        if any(self._unused[stage] for stage in worked):
            return worked
        return [stage for stage in self._space.stages if stage != 3]  # a lineage of stage 3 would stop at once

    @property
    def _cheaper_stages_that_worked(self) -> list[int]:
        return [stage for stage in (1, 2) if stage in self._largest_of_stage]


def _heads(flips: int, rng: random.Random) -> int:
    """Returns a draw of Binomial(flips, 0.5), the number of heads in flips of a fair coin.

    A small model on a large device has ranges of many millions. There the normal distribution of the same mean and
    variance is indistinguishable, and needs no random bit for each flip.
    """
    if flips <= EXACT_COIN_FLIPS:
        return rng.getrandbits(flips).bit_count() if flips else 0
    return min(flips, max(0, round(rng.gauss(flips / 2, sqrt(flips) / 2))))
