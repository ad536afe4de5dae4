"""Drives a search through a world with a virtual clock."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from benchmarks.replay.recorded import key_of
from benchmarks.replay.stopping import stopped_after
from benchmarks.replay.world import START_UP, World
from zerotune.trial_lib.messages.orders import SizeMemory, will_fit
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.base import Search


@dataclass(frozen=True)
class ReplayedTrial:
    """A trial of a replay that has ended.

    Attributes:
        ended_at: virtual seconds since the study began.
        candidate: what ran.
        outcome: how it ended.
        reported: what the study would answer if it ended now.
    """

    ended_at: float
    candidate: Candidate
    outcome: Outcome
    reported: Candidate


@dataclass
class Replay:
    """A search from its beginning to its end.

    Attributes:
        searched_from: virtual seconds that the profile and the submitted configuration took.
        submitted: what is answered before the search has found anything better.
        trials: those of the search, in the order in which they ended.
    """

    searched_from: float
    submitted: Candidate
    trials: list[ReplayedTrial] = field(default_factory=list)


@dataclass(order=True)
class _Event:
    at: float
    order: int
    act: Callable[[], None] = field(compare=False)


class _Driver:
    def __init__(self, search: Search, world: World, seed: int, concurrency: int, stops_hopeless: bool) -> None:
        self._search, self._world, self._seed = search, world, seed
        self._stops_hopeless = stops_hopeless
        self._events: list[_Event] = []
        self._runs = Counter[str]()
        self._order = count()
        self._places = concurrency
        profile = world.profile(random.Random(f"{seed}:profile"))
        submitted = replace(self._run(world.submitted), purpose=Purpose.SUBMITTED)
        self._submitted_value = submitted.metrics.get(search.metric.name)
        self._to_beat = submitted.metrics.get("throughput", 0.0)
        self._now = sum(profile[1].phases.values()) + sum(submitted.phases.values())
        search.observe(*profile)
        search.observe(world.submitted, submitted)
        self.replay = Replay(self._now, world.submitted)

    def drive(self) -> Replay:
        while True:
            while self._places and not self._search.finished and (asked := self._search.ask()) is not None:
                self._places -= 1
                self._start(asked)
            if not self._events or self._search.finished:
                return self.replay
            event = heapq.heappop(self._events)
            self._now = event.at
            event.act()

    def _start(self, asked: Candidate | Sweep) -> None:
        if isinstance(asked, Sweep):
            self._start_group(asked)
            return
        result = self._stopped(self._run(asked))
        at = self._now + sum(result.phases.values())
        self._at(at, self._tell, asked, result)
        self._at(at, self._free)

    def _start_group(self, sweep: Sweep) -> None:
        """Plans what a group measures, and when: a size is told as soon as it is."""
        at, measured = self._now, list[tuple[Candidate, TrialResult]]()
        withdrawal = Withdrawal.MEMORY
        left = list(sweep.candidates)
        while left:
            if measured and not _goes_on(sweep, measured, left[0]):
                break
            candidate = left.pop(0)
            result = self._run(candidate)
            paid = START_UP if measured else ()
            at += sum(s for name, s in result.phases.items() if name not in paid and name != "end")
            result = replace(result, swept=bool(measured))
            measured.append((candidate, result))
            self._at(at, self._tell, candidate, result)
            if result.outcome is not Outcome.COMPLETED:
                withdrawal = Withdrawal.ENDED
                break
        at += measured[-1][1].phases.get("end", 0.0)
        for candidate in left:
            self._at(at, self._search.withdraw, candidate, withdrawal)
        self._at(at, self._free)

    def _stopped(self, result: TrialResult) -> TrialResult:
        """Returns how a single trial ends where it cannot reach the fastest reading so far any more."""
        if not self._stops_hopeless or result.outcome is not Outcome.COMPLETED:
            return result
        samples = result.metrics["throughput"] * result.metrics["latency"]
        counted = stopped_after(result.step_times, samples, self._to_beat)
        if counted is None:
            return result
        # A step of the warm-up may be in the phase as well.
        made = (counted + 1) / (len(result.step_times) + 1)
        stopped = {
            "outcome": Outcome.TOO_SLOW,
            "metrics": {},
            "step_times": result.step_times[:counted],
            "phases": {**result.phases, "steps": result.phases["steps"] * made},
        }
        return replace(result, **stopped)

    def _run(self, candidate: Candidate) -> TrialResult:
        # The same candidate reads the same in every search of a seed, the first time: their differences are then
        # their own.
        key = key_of(candidate)
        self._runs[key] += 1
        repeat = f":{self._runs[key]}" if self._runs[key] > 1 else ""
        return self._world.run(candidate, random.Random(f"{self._seed}:{key}{repeat}"))

    def _at(self, at: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, _Event(at, next(self._order), lambda: act(*arguments)))

    def _tell(self, candidate: Candidate, result: TrialResult) -> None:
        self._search.tell(candidate, result)
        self._to_beat = max(self._to_beat, result.metrics.get("throughput", 0.0))
        self.replay.trials.append(ReplayedTrial(self._now, candidate, result.outcome, self._reported()))

    def _free(self) -> None:
        self._places += 1

    def _reported(self) -> Candidate:
        best = self._search.best
        if best is None:
            return self._world.submitted
        value = best[1].metrics[self._search.metric.name]
        own = self._submitted_value
        return best[0] if own is None or self._search.metric.better(value, than=own) else self._world.submitted


def simulate(search: Search, world: World, seed: int, concurrency: int = 1, stops_hopeless: bool = False) -> Replay:
    """Returns what a search does in a world.

    Every study begins with the profile trial and the submitted configuration; the search proposes the rest, up to its
    own budget.

    Args:
        search: one that has asked for nothing yet.
        world: what trials show.
        seed: of the noise.
        concurrency: trials, or sweeps, that run at once.
        stops_hopeless: whether a single trial ends when its steps show that it cannot win, as a study's do.
    """
    return _Driver(search, world, seed, concurrency, stops_hopeless).drive()


def _goes_on(sweep: Sweep, measured: Sequence[tuple[Candidate, TrialResult]], following: Candidate) -> bool:
    """Returns whether a group goes on to its next size, by the rule of a real one."""
    sizes = [
        SizeMemory(
            samples=candidate.micro_batch_size,
            above_initialize=max(map(int.__sub__, result.memory.peak, result.memory.after_initialize)),
            available=min(result.memory.available, default=None),
        )
        for candidate, result in measured
    ]
    return will_fit(sizes, following.micro_batch_size, sweep.bytes_per_sample, sweep.headroom)
