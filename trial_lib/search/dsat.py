"""dsat's searches over families: `random`, `binary` and `asha`."""

import random
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import sqrt
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.base import Search, SearchProblem, size_limit
from zerotune.trial_lib.search.knobs import ZERO_STAGES
from zerotune.trial_lib.search.methods import AshaSettings, BinarySettings, RandomSettings, SearchSettings
from zerotune.trial_lib.search.zero_settings import first_guess, precision_of


@dataclass(eq=False)
class Family:
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
    """A candidate, with the family it belongs to and the range of sizes it was taken from."""

    candidate: Candidate  # the candidate to run
    family: Family  # its family
    hi: int  # the largest size that the family held open when the candidate was chosen


class FamilySearch(Search):
    """Searches the micro-batch sizes of families drawn at random.

    As many families are open as trials may run at once. A family whose trial has ended waits for its turn, or gives
    its place to a new one. The method decides which.

    `out_of_memory` bounds the micro-batch size of its family, and `out_of_data` of all families. Any other failure
    (`invalid`, `crashed`, `timed_out`, `diverged`, `too_slow`, `cancelled`) and a missing metric say nothing about
    sizes, and end the family.
    """

    def __init__(self, settings: SearchSettings, problem: SearchProblem) -> None:
        super().__init__(settings, problem)
        precision = precision_of(problem.base_config, problem.profile.bytes_per_param)
        self._first_guess = {
            stage: first_guess(stage, problem.profile, precision, problem.slots) for stage in ZERO_STAGES
        }
        self._offered: Draw | None = None  # the answer of `_propose`
        self._running: dict[tuple[str, int], Draw] = {}
        self._families: dict[str, Family] = {}
        self._unused = {stage: list(range(problem.space.size(stage))) for stage in problem.space.stages}
        self._waiting: list[tuple[tuple[int, ...], int, Family]] = []
        self._arrivals = count()
        self._largest_run = 0
        self._stopped = False

    def _learn(self, candidate: Candidate, result: TrialResult) -> None:
        proposal = self._running.pop(candidate.key)
        family = proposal.family
        family.in_flight -= 1
        family.trials += 1
        value = self._value(result)
        is_best = False
        if value is not None:
            family.lo = max(family.lo, candidate.micro_batch_size + 1)
            self._largest_run = max(self._largest_run, candidate.micro_batch_size)
            if family.best is None or self.metric.better(value, than=family.best):
                family.best = value
            is_best = self._is_new_best(candidate, result, value)
        elif result.outcome is Outcome.OUT_OF_MEMORY or (result.from_outside and result.outcome is Outcome.CRASHED):
            # A rank that was killed may have been killed for its memory.
            family.ran_out_of_memory(candidate.micro_batch_size)
        elif result.outcome is Outcome.OUT_OF_DATA:
            self._ran_out_of_data(candidate.micro_batch_size)
        else:
            family.hi = family.lo - 1
        # Two failures of one reason may rule out sizes of other families.
        self._shared.tell(candidate, result)
        if self._shared.found:
            for known in self._families.values():
                self._leave_out(known)
        self._learn_metric(proposal, value, is_best)
        self._continue(family)

    def _ran_out_of_data(self, size: int) -> None:
        # Learns that the data are too few for a size. They are the same for every family.
        self._max_micro_batch = self._allowed(size - 1)
        self._stopped = self._max_micro_batch < 1
        for family in self._families.values():
            family.end_below(size)

    @property
    def finished(self) -> bool:
        return self._stopped or super().finished

    @abstractmethod
    def _first_range(self, stage: int) -> tuple[int, int]:
        """Returns the micro-batch sizes, least and largest, that a new family of a stage starts from."""

    @abstractmethod
    def _choose_size(self, family: Family, rng: random.Random) -> int:
        """Returns the next micro-batch size of a family."""

    @abstractmethod
    def _continue(self, family: Family) -> None:
        """Decides who waits for the next turn (`_wait`): the family, another, or none, so that a new one may start."""

    def _learn_metric(self, proposal: Draw, value: float | None, is_best: bool) -> None:
        """Learns a trial's metric (None: it failed), and whether it is the best of the search."""

    def _is_over(self, family: Family) -> bool:
        # Whether a waiting family is no longer worth its turn. Once true, it stays true.
        return False

    def _priority(self, family: Family) -> tuple[int, ...]:
        # A family's place in the queue. The smallest is served first; of equals, the earliest.
        return ()

    def _stages_for_new_families(self) -> Collection[int]:
        # The stages that a new family may come from. Those without an unused family are skipped.
        return self.space.stages

    def _wait(self, family: Family) -> None:
        if not family.in_flight:  # otherwise the end of its next trial does it
            heappush(self._waiting, (self._priority(family), next(self._arrivals), family))

    def _propose(self) -> Candidate | None:
        # It drops waiting families that are over, and changes nothing else.
        self._offered = None if self._stopped else self._offer()
        return None if self._offered is None else self._offered.candidate

    def _offer(self) -> Draw | None:
        rng = random.Random(f"{self._seed}:{self._asked + 1}")
        while self._waiting and (self._is_over(self._waiting[0][-1]) or not self._waiting[0][-1].has_sizes_left):
            heappop(self._waiting)
        family = self._waiting[0][-1] if self._waiting else self._draw_family(rng)
        if family is None:
            return None
        limit = size_limit(self._largest_run, self.problem.base_config.get(MICRO_BATCH))
        size = min(self._choose_size(family, rng), limit)
        return Draw(self._with_own_accumulation(family.knobs, size), family, family.hi)

    def _draw_family(self, rng: random.Random) -> Family | None:
        unused = {stage: self._open(stage) for stage in self._stages_for_new_families() if self._unused[stage]}
        stages = [stage for stage, families in unused.items() if families]
        if not stages:
            return None
        stage = rng.choice(stages)
        return self._new_family(stage, self.space.family(stage, rng.choice(unused[stage])))

    def _new_family(self, stage: int, knobs: dict[str, Any]) -> Family:
        lo, hi = self._first_range(stage)
        family = Family(knobs, stage, self._allowed(lo), self._allowed(hi))
        self._leave_out(family)
        return family

    def _leave_out(self, family: Family) -> None:
        # Removes from a family the sizes that two trials that failed alike rule out.
        largest = self._shared.largest(family.knobs)
        if largest is not None:
            family.hi = min(family.hi, largest)

    def _open(self, stage: int) -> list[int]:
        # The unused families of a stage that are not ruled out. Those of one arm are ruled out together.
        if not self._shared.found:
            return self._unused[stage]
        least = self._allowed(self._first_range(stage)[0])
        is_open: list[bool] = []
        for arm in (arm for arm in self.space.arms if arm.stage == stage):
            largest = self._shared.largest(arm.family(0))
            is_open += [largest is None or least <= largest] * arm.size
        return [index for index in self._unused[stage] if is_open[index]]

    def _begin(self, candidate: Candidate) -> None:
        """A candidate that `ask` would not have proposed starts a family of its own if it belongs to none so far."""
        proposal = self._offered if self._next() == candidate else None
        if proposal is None:
            known = self._families.get(candidate.family)
            family = known or self._new_family(candidate.zero_stage or 0, candidate.knobs)
            proposal = Draw(candidate, family, family.hi)
        family = proposal.family
        self._running[candidate.key] = proposal
        family.in_flight += 1
        if self._waiting and self._waiting[0][-1] is family:
            heappop(self._waiting)
        elif candidate.family in self._families:  # recorded out of turn
            self._waiting = [entry for entry in self._waiting if entry[-1] is not family]
            heapify(self._waiting)
        else:
            self._families[candidate.family] = family
            index = self.space.index(family.knobs)
            if index is not None:
                self._unused[family.stage].remove(index)


# `random`: random families with random sizes. A new family starts from its stage's best size.

EXACT_COIN_FLIPS = 4096


class RandomSearch(FamilySearch):
    """Draws sizes from the middle of a family's range, and leaves families that have little to add. The upper end of a
    range doubles when the lower end passes it, until a size has not fitted. Larger sizes would then fail again.
    """

    def __init__(self, settings: RandomSettings, problem: SearchProblem) -> None:
        super().__init__(settings, problem)
        self._trials_per_family = settings.trials_per_random_config
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

    def _choose_size(self, family: Family, rng: random.Random) -> int:
        return family.lo + _heads(family.hi - family.lo, rng)

    def _learn_metric(self, proposal: Draw, value: float | None, is_best: bool) -> None:
        family, size = proposal.family, proposal.candidate.micro_batch_size
        if value is not None:
            if not family.has_sizes_left and not family.out_of_memory:
                family.hi = self._allowed(2 * family.hi)
            stage = family.stage
            if stage not in self._best_of_stage or self.metric.better(value, than=self._best_of_stage[stage][0]):
                self._best_of_stage[stage] = value, proposal
            self._largest_of_stage[stage] = max(size, self._largest_of_stage.get(stage, 0))
        if is_best:
            self._trials_since_best = 0
        elif self.best is not None:
            self._trials_since_best += 1
            if self._trials_since_best == self._early_stopping:
                self._stopped = True

    def _continue(self, family: Family) -> None:
        if not self._is_over(family):
            self._wait(family)

    def _is_over(self, family: Family) -> bool:
        return (
            not family.has_sizes_left  # it failed at its lower end
            or family.trials >= self._trials_per_family
            or (family.stage == 3 and bool(self._cheaper_stages_that_worked))
            or (family.out_of_memory and self._largest_of_stage.get(family.stage, 0) >= family.hi)
        )

    def _stages_for_new_families(self) -> Collection[int]:
        worked = self._cheaper_stages_that_worked
        if not worked:
            return self.space.stages
        if any(self._unused[stage] for stage in worked):
            return worked
        return [stage for stage in self.space.stages if stage != 3]  # a family of stage 3 would stop at once

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


class BinarySearch(FamilySearch):
    """Tries the middle of a family's range. A size that runs raises the lower end, and one that fails lowers the upper
    end. A family without a size left gives its place to a new random one.
    """

    def __init__(self, settings: BinarySettings, problem: SearchProblem) -> None:
        super().__init__(settings, problem)
        self._range_factor = settings.search_range_factor

    def _first_range(self, stage: int) -> tuple[int, int]:
        return 1, max(1, int(self._first_guess[stage] * self._range_factor))

    def _choose_size(self, family: Family, rng: random.Random) -> int:
        return (family.lo + family.hi) // 2

    def _continue(self, family: Family) -> None:
        if family.has_sizes_left:
            self._wait(family)


# `asha`: asynchronous successive halving (arXiv 1810.05934) over families.


class _Rung:
    """The families that have completed a rung, ranked by their best metric until then."""

    def __init__(self) -> None:
        self.completed = 0
        self._ranking: list[tuple[float, int]] = []
        self._not_promoted: list[tuple[tuple[float, int], Family]] = []

    def add(self, family: Family, score: float | None) -> None:
        """The smallest score ranks first; None (no metric) does not rank."""
        rank = (score, self.completed) if score is not None else None
        self.completed += 1
        if rank is not None:
            insort(self._ranking, rank)  # moves a few kilobytes at most, so it is cheaper than a tree
            heappush(self._not_promoted, (rank, family))

    def best_not_promoted(self, level: int, among_first: int) -> Family | None:
        while self._not_promoted and self._not_promoted[0][1].rung > level:
            heappop(self._not_promoted)
        if not self._not_promoted:
            return None
        rank, family = self._not_promoted[0]
        return family if bisect_left(self._ranking, rank) < among_first else None


class AshaSearch(BinarySearch):
    """Gives each family few trials. The best 1 / divisor of those with equally many trials get more. When no unused
    family is left and the rule would leave places empty, the best unpromoted family is promoted.
    """

    def __init__(self, settings: AshaSettings, problem: SearchProblem) -> None:
        super().__init__(settings, problem)
        self._divisor = settings.divisor
        self._trials_of_rung = [
            settings.min_binary_search_trials * settings.divisor ** (settings.asha_early_stopping + rung)
            for rung in range(settings.max_rungs)
        ]
        self._rungs = [_Rung() for _ in range(settings.max_rungs)]

    def _priority(self, family: Family) -> tuple[int, ...]:
        return -family.rung, -family.trials

    def _continue(self, family: Family) -> None:
        if not self._has_completed_rung(family):
            self._wait(family)
            return
        self._enter(family)
        promoted = self._promote()
        if promoted is not None:
            self._wait(promoted)

    def _has_completed_rung(self, family: Family) -> bool:
        return family.trials >= self._trials_of_rung[family.rung] or not family.has_sizes_left

    def _enter(self, family: Family) -> None:
        score = family.best
        if score is not None and not self.metric.smaller_is_better:
            score = -score
        self._rungs[family.rung].add(family, score)

    def _promote(self) -> Family | None:
        """Promotes the best eligible family, and returns it. A family without a size left completes the rung above at
        once, and the next one is promoted.
        """
        while (family := self._promotable()) is not None:
            family.rung += 1
            if not self._has_completed_rung(family):
                return family
            self._enter(family)
        return None

    def _promotable(self) -> Family | None:
        below_the_top = list(enumerate(self._rungs))[-2::-1]
        for level, rung in below_the_top:
            family = rung.best_not_promoted(level, among_first=rung.completed // self._divisor)
            if family is not None:
                return family
        if not any(self._unused.values()):  # every family was used
            for level, rung in below_the_top:
                family = rung.best_not_promoted(level, among_first=rung.completed)
                if family is not None:
                    return family
        return None
