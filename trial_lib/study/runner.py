"""Runs the work of a study, each piece in a thread of its own. Every failure becomes a result."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import takewhile

from trial_lib.launch.place import Place
from trial_lib.launch.trial import TrialPlan, unstarted, write_unstarted
from trial_lib.records.candidate import Purpose, Sweep, Withdrawal
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.study.folder import FolderError, check_end, check_room, folder_error_told
from trial_lib.study.history import Withdrawn

WorkEnd = TrialResult | Withdrawn  # the end of a trial: its result, or the withdrawal of a size of a sweep


@dataclass(frozen=True)
class NotRun:
    """A trial that is not run."""

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
