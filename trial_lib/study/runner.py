"""Admits trials, and runs the work of a study, each piece in a thread of its own. Every failure becomes a result."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

from zerotune.trial_lib.deepspeed_config.layout import ModelShape
from zerotune.trial_lib.deepspeed_config.rules import broken_rules
from zerotune.trial_lib.device.base import available_bytes
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.launch.trial import Place, TrialPlan, unstarted, write_unstarted
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialResult, cause_of, without_log
from zerotune.trial_lib.records.units import bytes_shown
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.budgets import RESERVE, HostMemory, MemoryBasis
from zerotune.trial_lib.study.folder import FolderError, check_end, check_room, folder_error_told
from zerotune.trial_lib.study.history import Proposal, Withdrawn
from zerotune.trial_lib.study.setup import StudySetup

WorkEnd = TrialResult | Withdrawn  # the end of a trial: its result, or the withdrawal of a size of a sweep


class ElsewhereError(Exception):
    """Ranks run on another kind of device than the study's slots. Until that is fixed, no trial can measure."""


@dataclass(frozen=True)
class NotRun:
    outcome: Outcome  # the outcome that it gets
    reason: str  # why, in a sentence
    from_outside: bool = False  # whether the reason says nothing about its candidate


@dataclass(frozen=True)
class Work:
    """The work of one process group: a trial, or a sweep of several."""

    plans: tuple[TrialPlan, ...]  # of its trials, in order
    sweep: Sweep | None = None  # the sweep that the search asked for; None for a single trial
    known: TrialResult | None = None  # the result of a single trial whose ranks have run already; else None

    @property
    def numbers(self) -> list[int]:
        return [plan.number for plan in self.plans]

    @property
    def label(self) -> str:
        """Such as `trial-0007-z2-mbs16`, or `sweep-0007-z2-mbs4-to-16`."""
        first, last = self.plans[0], self.plans[-1]
        if self.sweep is None:
            return f"trial-{first.number:04d}-{first.label}"
        return f"sweep-{first.number:04d}-{first.label}-to-{last.candidate.micro_batch_size}"


def seconds_of(results: Iterable[TrialResult]) -> float:
    """The seconds in which trials ran. Time in which several ran counts once."""
    spans = sorted((result.started_at, result.started_at + sum(result.phases.values())) for result in results)
    seconds, counted_to = 0.0, 0.0
    for start, end in spans:
        seconds += max(0.0, end - max(start, counted_to))
        counted_to = max(counted_to, end)
    return seconds


def _lost(plans: Sequence[TrialPlan], reason: str) -> list[WorkEnd]:
    crashed = [unstarted(plan, Outcome.CRASHED, reason, from_outside=True) for plan in plans[:1]]
    return [*crashed, *(Withdrawn(plan.number, Withdrawal.ENDED) for plan in plans[1:])]


class Runner:
    """Runs work and passes its ends on."""

    def __init__(
        self,
        place: Place,
        log: logging.Logger,
        refusal: Callable[[TrialPlan], NotRun | None],
        starting: Callable[[TrialPlan], None],  # called right before its processes start
        # Runs a profile trial. It gets the function that runs one plan, and perhaps another after it.
        profile: Callable[[TrialPlan, Callable[..., TrialResult]], TrialResult],
    ) -> None:
        self.cancelled = threading.Event()  # ends everything that runs; may be set from any thread
        self._place = place
        self._log = log
        self._refusal = refusal
        self._starting = starting
        self._profile = profile
        self._ended: queue.SimpleQueue[WorkEnd | FolderError] = queue.SimpleQueue()
        self._begun: Future[list[WorkEnd]] | None = None
        self._to_join: Future[list[WorkEnd]] | None = None

    def begin(self, work: Work) -> None:
        """Returns at once. `run` then waits for the end."""
        ends: Future[list[WorkEnd]] = Future()

        def run() -> None:
            try:
                ends.set_result(self._run_to_end(work))
            except BaseException as error:  # noqa: BLE001 - `run` raises it
                ends.set_exception(error)

        self._begun = self._to_join = ends
        threading.Thread(target=run, daemon=True, name="begun-work").start()

    def await_begun(self, timeout_s: float) -> None:
        if self._begun is not None:
            wait([self._begun], timeout_s)

    def run(self, work: Work) -> list[WorkEnd]:
        """Runs one piece of work, or waits for the work that has begun, which is the first to be run.

        Call it from a thread of the work's own. `next_ended` returns each end as well. Both raise FolderError if there
        is no room for its files.
        """
        begun, self._to_join = self._to_join, None
        return self._run_to_end(work) if begun is None else begun.result()

    def _run_to_end(self, work: Work) -> list[WorkEnd]:
        ends: list[WorkEnd] = []
        root = work.plans[0].paths.root.parents[1]
        files = {plan.number: plan.paths for plan in work.plans}

        def put(end: WorkEnd) -> None:
            if isinstance(end, TrialResult):
                try:
                    check_end(root, end)
                except FolderError:
                    # A resumed study would read the file as the end of a trial that its history
                    # lacks.
                    files[end.number].result.unlink(missing_ok=True)
                    raise
            ends.append(end)
            self._ended.put(end)

        try:
            try:
                with folder_error_told(root):
                    check_room(root)
                    if work.known is not None:
                        put(work.known)
                    elif work.sweep is None:
                        put(self._run_trial(work.plans[0]))
                    else:
                        self._run_sweep(work.plans, work.sweep, put)
            except FolderError:
                raise
            except Exception as error:  # noqa: BLE001 - logged, and a result
                # This is a bug of ZeroTune. It costs only this work.
                self._log.exception("%s could not be run", work.label)
                reason = f"The trial could not be run: {type(error).__name__}: {error}"
                for end in _lost(work.plans[len(ends) :], reason):
                    put(end)
        except FolderError as full:
            self._ended.put(full)
            raise
        return ends

    def lose(self, plans: Sequence[TrialPlan], reason: str) -> None:
        """Ends the trials of work whose thread has died: the first one crashed, and the others never ran."""
        if self._ended.empty():
            for end in _lost(plans, reason):
                self._ended.put(end)

    def next_ended(self, timeout_s: float) -> WorkEnd | None:
        """Waits for a trial to end; None if none has in time. The main thread needs the time-out to receive signals."""
        try:
            end = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(end, FolderError):
            raise end
        return end

    def _run_trial(self, plan: TrialPlan) -> TrialResult:
        refusal = self._refusal(plan)
        if refusal is not None:
            result = unstarted(plan, refusal.outcome, refusal.reason, refusal.from_outside)
            write_unstarted(plan, result)
            return result
        return self._profile(plan, self._start) if plan.purpose is Purpose.PROFILE else self._start(plan)

    def _start(self, plan: TrialPlan, following: TrialPlan | None = None) -> TrialResult:
        """Runs one trial, and perhaps a following one in its ranks. Only its folder tells whether they have measured
        that.
        """
        self._starting(plan)
        if following is None:
            return self._place.run_trial(plan, self.cancelled, self._log.info)
        both = Sweep((plan.candidate, following.candidate), bytes_per_sample=0.0, headroom=0.0)
        ends = self._place.run_sweep((plan, following), both, self.cancelled, self._log.info, lambda *_: None)
        assert isinstance(ends[0], TrialResult)
        return ends[0]

    def _run_sweep(self, plans: Sequence[TrialPlan], sweep: Sweep, put: Callable[[WorkEnd], None]) -> None:
        refusal = self._refusal(plans[0])
        if refusal is not None:
            put(self._run_trial(plans[0]))
            for plan in plans[1:]:
                put(Withdrawn(plan.number, Withdrawal.ENDED))
            return
        # A refused size and all larger ones are not part of the group.
        self._starting(plans[0])
        runnable = list(takewhile(lambda plan: plan.refused is None, plans))
        plans, left = runnable, plans[len(runnable) :]
        sweep = replace(sweep, candidates=sweep.candidates[: -len(left)]) if left else sweep
        ends = self._place.run_sweep(plans, sweep, self.cancelled, self._log.info, lambda _, result: put(result))
        for plan, end in zip(plans, ends, strict=True):
            if isinstance(end, Withdrawal):
                put(Withdrawn(plan.number, end))
        for plan in left[:1]:
            put(self._run_trial(plan))
        for plan in left[1:]:
            put(Withdrawn(plan.number, Withdrawal.ENDED))


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
        self.waiting: list[Proposal] = []  # choices of the search that start before it is asked again
        self._running: dict[int, Candidate] = {}

    def profiled(
        self, model: ModelProfile | None, base_config: Mapping[str, Any], foreseen: Sequence[ForeseenArm] = ()
    ) -> None:
        self._model, self._base_config = model, base_config
        basis = None if model is None else MemoryBasis(model, base_config, self._slots, self._device, foreseen)
        self._memory = None if basis is None else HostMemory(basis)

    def next(self, ask: Callable[[], Proposal | None]) -> Proposal | None:
        """The trials that may start now; None if nothing may start before another trial has ended.

        What `ask` returns counts as asked of the search.
        """
        if self._runs_alone(self._running.values()):
            return None
        proposal = self.waiting.pop(0) if self.waiting else ask()
        if proposal is not None and self._running and self._runs_alone(each for _, each in proposal.numbered):
            self.waiting.insert(0, proposal)
            return None
        return proposal

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
    layout: dict[str, Any] = {"slots": candidate.slots, "shape": ModelShape.of(model)}
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
            self._searched.add((result.config_hash, candidate.family))

    def known(self, config_hash: str, candidate: Candidate) -> int | None:
        """The number of the trial that has measured a candidate of the search already.

        None if the candidate has to run: no trial had its configuration, or the search asks for it again by the same
        name to measure it once more.
        """
        is_asked_again = (config_hash, candidate.family) in self._searched
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
