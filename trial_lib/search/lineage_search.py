"""The common part of the searches over lineages: the queue of lineages that wait for their turn."""

import random
from abc import abstractmethod
from collections.abc import Collection
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from trial_lib.deepspeed_config.overrides import MICRO_BATCH
from trial_lib.memory.states import first_guess, precision_of
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.search.base import Search, SearchProblem, size_limit
from trial_lib.search.lineage import Lineage, Proposal
from trial_lib.search.settings import SearchSettings
from trial_lib.space.knobs import ZERO_STAGES


class LineageSearch(Search):
    """Searches the micro-batch sizes of lineages drawn at random.

    As many lineages are open as trials may run at once. A lineage whose trial has ended waits for its turn, or gives
    its place to a new one. The method decides which.

    `out_of_memory` bounds the micro-batch size of its lineage, and `out_of_data` of all lineages. Any other failure
    (`invalid`, `crashed`, `timed_out`, `diverged`, `too_slow`, `cancelled`) and a missing metric say nothing about
    sizes, and end the lineage.
    """

    def __init__(self, settings: SearchSettings, problem: SearchProblem) -> None:
        """Starts with nothing asked for."""
        super().__init__(settings, problem)
        self._space = problem.space
        precision = precision_of(problem.base_config, problem.profile.bytes_per_param)
        self._first_guess = {
            stage: first_guess(stage, problem.profile, precision, problem.slots) for stage in ZERO_STAGES
        }
        self._in_flight: dict[tuple[str, int], Proposal] = {}
        self._lineages: dict[str, Lineage] = {}
        self._unused = {stage: list(range(problem.space.size(stage))) for stage in problem.space.stages}
        self._waiting: list[tuple[tuple[int, ...], int, Lineage]] = []
        self._arrivals = count()
        self._largest_run = 0
        self._stopped = False

    def ask(self) -> Candidate | None:
        """Returns the next candidate; None when `finished`, or while it needs the result of a running trial."""
        proposal = self._propose()
        if proposal is None:
            return None
        self._start(proposal)
        return proposal.candidate

    def apply(self, candidate: Candidate) -> None:
        """Takes an ask from a record instead of asking. The search then is as if it had proposed the candidate.

        A candidate that `ask` would not have proposed starts a lineage of its own if it belongs to none so far.
        """
        proposal = self._propose()
        if proposal is None or proposal.candidate != candidate:
            lineage = self._lineages.get(candidate.lineage)
            if lineage is None:
                lineage = self._new_lineage(candidate.zero_stage or 0, candidate.knobs)
            proposal = Proposal(candidate, lineage, lineage.hi)
        self._start(proposal)

    def tell(self, candidate: Candidate, result: TrialResult) -> None:
        """Learns how a candidate's trial ended.

        Raises:
            KeyError: the candidate is not in flight.
        """
        proposal = self._in_flight.pop((candidate.lineage, candidate.micro_batch_size))
        lineage = proposal.lineage
        lineage.in_flight -= 1
        lineage.trials += 1
        value = self._value(result)
        is_best = False
        if value is not None:
            lineage.ran(candidate.micro_batch_size)
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
            lineage.end()
        self._shared.tell(candidate, result)
        if self._shared.found:
            for known in self._lineages.values():
                self._leave_out(known)
        self._learn(proposal, value, is_best)
        self._continue(lineage)

    def _ran_out_of_data(self, size: int) -> None:
        """Learns that the data are too few for a size. They are the same for every lineage."""
        self._max_micro_batch = self._allowed(size - 1)
        self._stopped = self._max_micro_batch < 1
        for lineage in self._lineages.values():
            lineage.end_below(size)

    @property
    def finished(self) -> bool:
        """Whether the search has nothing more to propose and waits for nothing.

        A search that stops early is finished at once. The trials in flight can be cancelled, and may still be told.
        """
        return self._stopped or (not self._in_flight and self._propose() is None)

    @abstractmethod
    def _first_range(self, stage: int) -> tuple[int, int]:
        """Returns the micro-batch sizes, least and largest, that a new lineage of a stage starts from."""

    @abstractmethod
    def _choose_size(self, lineage: Lineage, rng: random.Random) -> int:
        """Returns the next micro-batch size of a lineage."""

    @abstractmethod
    def _continue(self, lineage: Lineage) -> None:
        """Decides who waits for the next turn (`_wait`): the lineage, another one, or none, so that a new one may
        start.
        """

    def _learn(self, proposal: Proposal, value: float | None, is_best: bool) -> None:
        """Learns a trial's metric (None: it failed), and whether it is the best of the search."""

    def _is_over(self, lineage: Lineage) -> bool:
        """Returns whether a waiting lineage is no longer worth its turn. Once true, it stays true."""
        return False

    def _priority(self, lineage: Lineage) -> tuple[int, ...]:
        """Returns a lineage's place in the queue. The smallest is served first; of equals, the earliest."""
        return ()

    def _stages_for_new_lineages(self) -> Collection[int]:
        """Returns the stages that a new lineage may come from. Those without an unused lineage are skipped."""
        return self._space.stages

    @property
    def _every_lineage_was_used(self) -> bool:
        return not any(self._unused.values())

    def _wait(self, lineage: Lineage) -> None:
        if not lineage.in_flight:  # otherwise the end of its next trial does it
            heappush(self._waiting, (self._priority(lineage), next(self._arrivals), lineage))

    def _propose(self) -> Proposal | None:
        """Returns the answer of `ask`. It changes nothing, except that it drops waiting lineages that are over."""
        if self._stopped or self._asked >= self._budget or len(self._in_flight) >= self._concurrency:
            return None
        rng = random.Random(f"{self._seed}:{self._asked + 1}")
        while self._waiting and (self._is_over(self._waiting[0][-1]) or not self._waiting[0][-1].has_sizes_left):
            heappop(self._waiting)
        lineage = self._waiting[0][-1] if self._waiting else self._draw_lineage(rng)
        if lineage is None:
            return None
        limit = size_limit(self._largest_run, self.problem.base_config.get(MICRO_BATCH))
        size = min(self._choose_size(lineage, rng), limit)
        return Proposal(self._with_own_accumulation(lineage.knobs, size), lineage, lineage.hi)

    def _draw_lineage(self, rng: random.Random) -> Lineage | None:
        unused = {stage: self._open(stage) for stage in self._stages_for_new_lineages() if self._unused[stage]}
        stages = [stage for stage, lineages in unused.items() if lineages]
        if not stages:
            return None
        stage = rng.choice(stages)
        return self._new_lineage(stage, self._space.lineage(stage, rng.choice(unused[stage])))

    def _new_lineage(self, stage: int, knobs: dict[str, Any]) -> Lineage:
        lo, hi = self._first_range(stage)
        lineage = Lineage(knobs, stage, self._allowed(lo), self._allowed(hi))
        self._leave_out(lineage)
        return lineage

    def _leave_out(self, lineage: Lineage) -> None:
        """Removes from a lineage the sizes that two trials that failed alike rule out."""
        largest = self._shared.largest(lineage.knobs)
        if largest is not None:
            lineage.hi = min(lineage.hi, largest)

    def _open(self, stage: int) -> list[int]:
        """Returns the unused lineages of a stage that are not ruled out. Those of one arm are ruled out together."""
        if not self._shared.found:
            return self._unused[stage]
        least = self._allowed(self._first_range(stage)[0])
        is_open: list[bool] = []
        for arm in (arm for arm in self._space.arms if arm.stage == stage):
            largest = self._shared.largest(arm.lineage(0))
            is_open += [largest is None or least <= largest] * arm.size
        return [index for index in self._unused[stage] if is_open[index]]

    def _start(self, proposal: Proposal) -> None:
        candidate, lineage = proposal.candidate, proposal.lineage
        self._asked += 1
        self._in_flight[candidate.lineage, candidate.micro_batch_size] = proposal
        lineage.in_flight += 1
        if self._waiting and self._waiting[0][-1] is lineage:
            heappop(self._waiting)
        elif candidate.lineage in self._lineages:  # recorded out of turn
            self._waiting = [entry for entry in self._waiting if entry[-1] is not lineage]
            heapify(self._waiting)
        else:
            self._lineages[candidate.lineage] = lineage
            index = self._space.index(lineage.knobs)
            if index is not None:
                self._unused[lineage.stage].remove(index)
