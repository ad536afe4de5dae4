"""dsat's searches over lineages: `random`, `binary` and `asha`."""

import random
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import sqrt
from typing import Any

from trial_lib.deepspeed_config.overrides import MICRO_BATCH
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.search.base import Search, SearchProblem, size_limit
from trial_lib.search.knobs import ZERO_STAGES
from trial_lib.search.methods import AshaSettings, BinarySettings, RandomSettings, SearchSettings
from trial_lib.search.zero_settings import first_guess, precision_of


@dataclass(eq=False)
class Lineage:
    """One setting of the knobs other than the micro-batch size. Its sizes are searched trial after trial."""

    knobs: dict[str, Any]  # in the DeepSpeed configuration's own shape
    stage: int  # its ZeRO stage
    lo: int  # the smallest micro-batch size (samples) still worth trying
    hi: int  # the largest size worth trying. No size is left once it is below `lo`.
    trials: int = 0  # how many of its trials have ended
    in_flight: int = 0  # trials that were asked for and have not ended. Only a recorded history has more than one.
    out_of_memory: bool = False  # whether one of its sizes did not fit
    best: float | None = None  # the best metric of its trials
    rung: int = 0  # the ASHA rung it is in; 0 with other methods

    @property
    def has_sizes_left(self) -> bool:
        return self.lo <= self.hi

    def ran_out_of_memory(self, micro_batch_size: int) -> None:
        self.out_of_memory = True
        self.end_below(micro_batch_size)

    def end_below(self, micro_batch_size: int) -> None:
        self.hi = min(self.hi, micro_batch_size - 1)


@dataclass(frozen=True)
class Draw:
    """A candidate, with the lineage it belongs to and the range of sizes it was taken from."""

    candidate: Candidate  # the candidate to run
    lineage: Lineage  # its lineage
    hi: int  # the largest size that the lineage held open when the candidate was chosen


class LineageSearch(Search):
    """Searches the micro-batch sizes of lineages drawn at random.

    As many lineages are open as trials may run at once. A lineage whose trial has ended waits for its turn, or gives
    its place to a new one. The method decides which.

    `out_of_memory` bounds the micro-batch size of its lineage, and `out_of_data` of all lineages. Any other failure
    (`invalid`, `crashed`, `timed_out`, `diverged`, `too_slow`, `cancelled`) and a missing metric say nothing about
    sizes, and end the lineage.
    """

    def __init__(self, settings: SearchSettings, problem: SearchProblem) -> None:
        super().__init__(settings, problem)
        precision = precision_of(problem.base_config, problem.profile.bytes_per_param)
        self._first_guess = {
            stage: first_guess(stage, problem.profile, precision, problem.slots) for stage in ZERO_STAGES
        }
        self._offered: Draw | None = None  # the answer of `_propose`
        self._running: dict[tuple[str, int], Draw] = {}
        self._lineages: dict[str, Lineage] = {}
        self._unused = {stage: list(range(problem.space.size(stage))) for stage in problem.space.stages}
        self._waiting: list[tuple[tuple[int, ...], int, Lineage]] = []
        self._arrivals = count()
        self._largest_run = 0
        self._stopped = False

    def _learn(self, candidate: Candidate, result: TrialResult) -> None:
        proposal = self._running.pop(candidate.key)
        lineage = proposal.lineage
        lineage.in_flight -= 1
        lineage.trials += 1
        value = self._value(result)
        is_best = False
        if value is not None:
            lineage.lo = max(lineage.lo, candidate.micro_batch_size + 1)
            self._largest_run = max(self._largest_run, candidate.micro_batch_size)
            if lineage.best is None or self.metric.better(value, than=lineage.best):
                lineage.best = value
            is_best = self._is_new_best(candidate, result, value)
        elif result.outcome is Outcome.OUT_OF_MEMORY or (result.from_outside and result.outcome is Outcome.CRASHED):
            # A rank that was killed may have been killed for its memory.
            lineage.ran_out_of_memory(candidate.micro_batch_size)
        elif result.outcome is Outcome.OUT_OF_DATA:
            self._ran_out_of_data(candidate.micro_batch_size)
        else:
            lineage.hi = lineage.lo - 1
        # Two failures of one reason may rule out sizes of other lineages.
        self._shared.tell(candidate, result)
        if self._shared.found:
            for known in self._lineages.values():
                self._leave_out(known)
        self._learn_metric(proposal, value, is_best)
        self._continue(lineage)

    def _ran_out_of_data(self, size: int) -> None:
        # Learns that the data are too few for a size. They are the same for every lineage.
        self._max_micro_batch = self._allowed(size - 1)
        self._stopped = self._max_micro_batch < 1
        for lineage in self._lineages.values():
            lineage.end_below(size)

    @property
    def finished(self) -> bool:
        return self._stopped or super().finished

    @abstractmethod
    def _first_range(self, stage: int) -> tuple[int, int]:
        """Returns the micro-batch sizes, least and largest, that a new lineage of a stage starts from."""

    @abstractmethod
    def _choose_size(self, lineage: Lineage, rng: random.Random) -> int:
        """Returns the next micro-batch size of a lineage."""

    @abstractmethod
    def _continue(self, lineage: Lineage) -> None:
        """Decides who waits for the next turn (`_wait`): the lineage, another, or none, so that a new one may start."""

    def _learn_metric(self, proposal: Draw, value: float | None, is_best: bool) -> None:
        """Learns a trial's metric (None: it failed), and whether it is the best of the search."""

    def _is_over(self, lineage: Lineage) -> bool:
        # Whether a waiting lineage is no longer worth its turn. Once true, it stays true.
        return False

    def _priority(self, lineage: Lineage) -> tuple[int, ...]:
        # A lineage's place in the queue. The smallest is served first; of equals, the earliest.
        return ()

    def _stages_for_new_lineages(self) -> Collection[int]:
        # The stages that a new lineage may come from. Those without an unused lineage are skipped.
        return self.space.stages

    def _wait(self, lineage: Lineage) -> None:
        if not lineage.in_flight:  # otherwise the end of its next trial does it
            heappush(self._waiting, (self._priority(lineage), next(self._arrivals), lineage))

    def _propose(self) -> Candidate | None:
        # It drops waiting lineages that are over, and changes nothing else.
        self._offered = None if self._stopped else self._offer()
        return None if self._offered is None else self._offered.candidate

    def _offer(self) -> Draw | None:
        rng = random.Random(f"{self._seed}:{self._asked + 1}")
        while self._waiting and (self._is_over(self._waiting[0][-1]) or not self._waiting[0][-1].has_sizes_left):
            heappop(self._waiting)
        lineage = self._waiting[0][-1] if self._waiting else self._draw_lineage(rng)
        if lineage is None:
            return None
        limit = size_limit(self._largest_run, self.problem.base_config.get(MICRO_BATCH))
        size = min(self._choose_size(lineage, rng), limit)
        return Draw(self._with_own_accumulation(lineage.knobs, size), lineage, lineage.hi)

    def _draw_lineage(self, rng: random.Random) -> Lineage | None:
        unused = {stage: self._open(stage) for stage in self._stages_for_new_lineages() if self._unused[stage]}
        stages = [stage for stage, lineages in unused.items() if lineages]
        if not stages:
            return None
        stage = rng.choice(stages)
        return self._new_lineage(stage, self.space.lineage(stage, rng.choice(unused[stage])))

    def _new_lineage(self, stage: int, knobs: dict[str, Any]) -> Lineage:
        lo, hi = self._first_range(stage)
        lineage = Lineage(knobs, stage, self._allowed(lo), self._allowed(hi))
        self._leave_out(lineage)
        return lineage

    def _leave_out(self, lineage: Lineage) -> None:
        # Removes from a lineage the sizes that two trials that failed alike rule out.
        largest = self._shared.largest(lineage.knobs)
        if largest is not None:
            lineage.hi = min(lineage.hi, largest)

    def _open(self, stage: int) -> list[int]:
        # The unused lineages of a stage that are not ruled out. Those of one arm are ruled out together.
        if not self._shared.found:
            return self._unused[stage]
        least = self._allowed(self._first_range(stage)[0])
        is_open: list[bool] = []
        for arm in (arm for arm in self.space.arms if arm.stage == stage):
            largest = self._shared.largest(arm.lineage(0))
            is_open += [largest is None or least <= largest] * arm.size
        return [index for index in self._unused[stage] if is_open[index]]

    def _begin(self, candidate: Candidate) -> None:
        """A candidate that `ask` would not have proposed starts a lineage of its own if it belongs to none so far."""
        proposal = self._offered if self._next() == candidate else None
        if proposal is None:
            known = self._lineages.get(candidate.lineage)
            lineage = known or self._new_lineage(candidate.zero_stage or 0, candidate.knobs)
            proposal = Draw(candidate, lineage, lineage.hi)
        lineage = proposal.lineage
        self._running[candidate.key] = proposal
        lineage.in_flight += 1
        if self._waiting and self._waiting[0][-1] is lineage:
            heappop(self._waiting)
        elif candidate.lineage in self._lineages:  # recorded out of turn
            self._waiting = [entry for entry in self._waiting if entry[-1] is not lineage]
            heapify(self._waiting)
        else:
            self._lineages[candidate.lineage] = lineage
            index = self.space.index(lineage.knobs)
            if index is not None:
                self._unused[lineage.stage].remove(index)


# `random`: random lineages with random sizes. A new lineage starts from its stage's best size.

EXACT_COIN_FLIPS = 4096


class RandomSearch(LineageSearch):
    """Draws sizes from the middle of a lineage's range, and leaves lineages that have little to add. The upper end of a
    range doubles when the lower end passes it, until a size has not fitted. Larger sizes would then fail again.
    """

    def __init__(self, settings: RandomSettings, problem: SearchProblem) -> None:
        super().__init__(settings, problem)
        self._trials_per_lineage = settings.trials_per_random_config
        self._early_stopping = settings.early_stopping
        self._trials_since_best = 0
        self._best_of_stage: dict[int, tuple[float, Draw]] = {}
        self._largest_of_stage: dict[int, int] = {}

    def _first_range(self, stage: int) -> tuple[int, int]:
        if stage not in self._best_of_stage:
            return 1, self._first_guess[stage]
        _, best = self._best_of_stage[stage]
        lo = best.candidate.micro_batch_size + 1
        return lo, max(self._largest_of_stage[stage], best.hi, 2 * lo)

    def _choose_size(self, lineage: Lineage, rng: random.Random) -> int:
        return lineage.lo + _heads(lineage.hi - lineage.lo, rng)

    def _learn_metric(self, proposal: Draw, value: float | None, is_best: bool) -> None:
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
            return self.space.stages
        if any(self._unused[stage] for stage in worked):
            return worked
        return [stage for stage in self.space.stages if stage != 3]  # a lineage of stage 3 would stop at once

    @property
    def _cheaper_stages_that_worked(self) -> list[int]:
        return [stage for stage in (1, 2) if stage in self._largest_of_stage]


def _heads(flips: int, rng: random.Random) -> int:
    """Returns a draw of Binomial(flips, 0.5), the number of heads in flips of a fair coin. A small model on a large
    device has ranges of many millions. There the normal distribution of the same mean and variance is
    indistinguishable, and needs no random bit for each flip.
    """
    if flips <= EXACT_COIN_FLIPS:
        return rng.getrandbits(flips).bit_count() if flips else 0
    return min(flips, max(0, round(rng.gauss(flips / 2, sqrt(flips) / 2))))


class BinarySearch(LineageSearch):
    """Tries the middle of a lineage's range. A size that runs raises the lower end, and one that fails lowers the upper
    end. A lineage without a size left gives its place to a new random one.
    """

    def __init__(self, settings: BinarySettings, problem: SearchProblem) -> None:
        super().__init__(settings, problem)
        self._range_factor = settings.search_range_factor

    def _first_range(self, stage: int) -> tuple[int, int]:
        return 1, max(1, int(self._first_guess[stage] * self._range_factor))

    def _choose_size(self, lineage: Lineage, rng: random.Random) -> int:
        return (lineage.lo + lineage.hi) // 2

    def _continue(self, lineage: Lineage) -> None:
        if lineage.has_sizes_left:
            self._wait(lineage)


# `asha`: asynchronous successive halving (arXiv 1810.05934) over lineages.


class _Rung:
    """The lineages that have completed a rung, ranked by their best metric until then."""

    def __init__(self) -> None:
        self.completed = 0
        self._ranking: list[tuple[float, int]] = []
        self._not_promoted: list[tuple[tuple[float, int], Lineage]] = []

    def add(self, lineage: Lineage, score: float | None) -> None:
        """The smallest score ranks first; None (no metric) does not rank."""
        rank = (score, self.completed) if score is not None else None
        self.completed += 1
        if rank is not None:
            insort(self._ranking, rank)  # moves a few kilobytes at most, so it is cheaper than a tree
            heappush(self._not_promoted, (rank, lineage))

    def best_not_promoted(self, level: int, among_first: int) -> Lineage | None:
        while self._not_promoted and self._not_promoted[0][1].rung > level:
            heappop(self._not_promoted)
        if not self._not_promoted:
            return None
        rank, lineage = self._not_promoted[0]
        return lineage if bisect_left(self._ranking, rank) < among_first else None


class AshaSearch(BinarySearch):
    """Gives each lineage few trials. The best 1 / divisor of those with equally many trials get more. When no unused
    lineage is left and the rule would leave places empty, the best unpromoted lineage is promoted.
    """

    def __init__(self, settings: AshaSettings, problem: SearchProblem) -> None:
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
        """Promotes the best eligible lineage, and returns it. A lineage without a size left completes the rung above at
        once, and the next one is promoted.
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
        if not any(self._unused.values()):  # every lineage was used
            for level, rung in below_the_top:
                lineage = rung.best_not_promoted(level, among_first=rung.completed)
                if lineage is not None:
                    return lineage
        return None
