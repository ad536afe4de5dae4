"""Admission of trials: which of the chosen trials run, and which of them run alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from trial_lib.deepspeed_config.rules import broken_rules
from trial_lib.device.base import available_bytes
from trial_lib.device.this_host import kind_of
from trial_lib.launch.trial import TrialPlan
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.result import ModelProfile, Outcome, TrialResult, cause_of, without_log
from trial_lib.records.units import bytes_shown
from trial_lib.search.allocations import ForeseenArm
from trial_lib.search.budgets import RESERVE, HostMemory, MemoryBasis
from trial_lib.study.history import Asked, AskedSweep, Decided, Event, Told
from trial_lib.study.runner import NotRun
from trial_lib.study.setup import StudySetup


class Admission:
    """Holds chosen trials back, and picks the next one that may start.

    It admits everything until the profile trial has shown the model.
    """

    def __init__(self, setup: StudySetup) -> None:
        self._device: Literal["cpu", "cuda"] = "cpu" if kind_of(setup.device).computes_on_the_processor else "cuda"
        self._slots = setup.slots
        # The free memory of other hosts is not known here.
        self._is_here = not setup.experiment.config.resources.hosts and setup.arguments.ray_address is None
        self._base_config: Mapping[str, Any] = {}
        self._model: ModelProfile | None = None
        self._memory: HostMemory | None = None
        self.waiting: list[Decided] = []  # choices of the search that start before it is asked again
        self._running: dict[int, Candidate] = {}

    def profiled(
        self, model: ModelProfile | None, base_config: Mapping[str, Any], foreseen: Sequence[ForeseenArm] = ()
    ) -> None:
        self._model, self._base_config = model, base_config
        basis = None if model is None else MemoryBasis(model, base_config, self._slots, self._device, foreseen)
        self._memory = None if basis is None else HostMemory(basis)

    def next(self, ask: Callable[[], Decided | None]) -> Decided | None:
        """The trials that may start now; None if nothing may start before another trial has ended.

        What `ask` returns counts as asked of the search.
        """
        if self._runs_alone(self._running.values()):
            return None
        decided = self.waiting.pop(0) if self.waiting else ask()
        if decided is not None and self._running and self._runs_alone(each for _, each in decided.numbered):
            self.waiting.insert(0, decided)
            return None
        return decided

    def started(self, plans: Iterable[TrialPlan]) -> None:
        self._running.update({plan.number: plan.candidate for plan in plans})

    def ended(self, number: int) -> None:
        """A trial has ended, or a size of a sweep was withdrawn."""
        self._running.pop(number, None)

    def _runs_alone(self, candidates: Iterable[Candidate]) -> bool:
        # Offloaded states use the host's memory, its bandwidth, the buses to the devices, and the cores.
        memory = self._memory
        return memory is not None and any(memory.needed(candidate) > 0 for candidate in candidates)

    def why_not(self, plan: TrialPlan) -> NotRun | None:
        """Why a trial is not run; None if it is.

        It is not if its configuration breaks a rule that the user's keeps, or offloads more than the host has, or if a
        wrapper does not start the program with it.
        """
        if plan.refused is not None:
            return NotRun(*plan.refused)
        if self._model is None or self._memory is None or plan.purpose not in (Purpose.SEARCH, Purpose.CONFIRM):
            return None
        broken = _broken_rule(plan.candidate, self._base_config, self._model, self._device)
        if broken is not None and plan.purpose is Purpose.SEARCH:
            return NotRun(Outcome.INVALID, broken)
        return self._lack(plan.candidate, self._memory)

    def _lack(self, candidate: Candidate, memory: HostMemory) -> NotRun | None:
        reason = memory.lack(candidate)
        if reason:
            return NotRun(Outcome.OUT_OF_HOST_MEMORY, f"Not tried: {reason}")
        # The user's configuration has run with as much. A sum that is too large may not stop this one.
        needed = memory.needed(candidate) * self._slots if memory.needed(candidate) > memory.own else 0.0
        free = available_bytes() if needed and self._is_here else None
        if free is None or needed <= (1 - RESERVE) * free:
            return None
        reason = (
            f"Not tried: it would keep {bytes_shown(needed)} in the host's memory, of which {bytes_shown(free)} are "
            "free now: other processes have the rest."
        )
        return NotRun(Outcome.OUT_OF_HOST_MEMORY, reason, from_outside=True)


def _broken_rule(
    candidate: Candidate,
    base_config: Mapping[str, Any],
    model: ModelProfile,
    device: Literal["cpu", "cuda"],
) -> str | None:
    # Why a candidate breaks a rule that the user's configuration keeps; None if it breaks none.
    pipeline, replicas = model.pipeline_parallel, candidate.data_parallel_size
    layout: dict[str, Any] = {"slots": candidate.slots, "shape": model.shape}
    own = {rule.name for rule in broken_rules(base_config, device, pipeline, model.data_parallel_size, **layout)}
    rules = broken_rules(candidate.complete(base_config), device, pipeline, replicas, **layout)
    return next((rule.reason for rule in rules if rule.name not in own), None)


class MeasuredConfigs:
    """The trials of a study by the complete configuration that they ran. None runs twice."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._searched: set[tuple[str, str]] = set()

    def add(self, result: TrialResult, candidate: Candidate) -> None:
        """A trial that was killed from outside says nothing about its configuration, and is not added."""
        if result.from_outside:
            return
        self._first.setdefault(result.config_hash, result.number)
        if result.purpose is Purpose.SEARCH:
            self._searched.add((result.config_hash, candidate.lineage))

    def known(self, config_hash: str, candidate: Candidate) -> int | None:
        """The number of the trial that has measured a candidate of the search already.

        None if the candidate has to run: no trial had its configuration, or the search asks for it again by the same
        name to measure it once more.
        """
        is_asked_again = (config_hash, candidate.lineage) in self._searched
        return None if is_asked_again else self._first.get(config_hash)


class SecondTries:
    """A failure that may be chance is tried once more before the search learns of it.

    It depends only on the results, so a resumed study has the same second tries.
    """

    def __init__(self) -> None:
        self.waiting: list[Candidate] = []  # whose second trial has not begun, in order
        self._first: dict[tuple[str, int], str] = {}
        self._repeated: set[str] = set()

    def takes(self, candidate: Candidate, result: TrialResult, spend: Callable[[], bool]) -> bool:
        """Whether a candidate runs once more, so that the search does not learn of its result.

        `spend` takes one trial of the budget, and returns False if none is left.
        """
        key, cause = candidate.key, cause_of(without_log(result.reason))
        before = self._first.pop(key, None)
        # A lack of memory or of data follows from the size, and a second deadline costs more than it tells. A search
        # itself asks again for a candidate that was killed from outside.
        if result.outcome is not Outcome.CRASHED or result.from_outside:
            return False
        if before is not None:
            self._repeated |= {cause} if cause == before else set()
            return False
        if cause in self._repeated or not spend():
            return False
        self._first[key] = cause
        self.waiting.append(candidate)
        return True

    def begins(self, candidate: Candidate) -> bool:
        """Takes the start of a trial. Returns whether it is a second try, for which the search has not asked."""
        if candidate not in self.waiting:
            return False
        self.waiting.remove(candidate)
        return True


def not_tried_again(events: Sequence[Event]) -> set[int]:
    """The numbers of the crashed trials whose candidate was not tried again before the search went on.

    Such a history is of an older version, whose search has learned of the crash at once.
    """
    asks = [event for event in events if isinstance(event, Asked | AskedSweep)]
    keys = {number: candidate.key for event in asks for number, candidate in event.decided.numbered}
    found: set[int] = set()
    later: set[tuple[str, int]] = set()
    for event in reversed(events):
        if isinstance(event, AskedSweep) or (isinstance(event, Asked) and event.purpose is Purpose.SEARCH):
            later |= {keys[number] for number, _ in event.decided.numbered}
        elif isinstance(event, Told) and event.result.outcome is Outcome.CRASHED and later:
            found |= {event.number} if keys[event.number] not in later else set()
    return found
