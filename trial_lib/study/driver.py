"""The driver of a study: decides on trials, runs them, and records how they ended."""

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, keep_secret
from zerotune.trial_lib.launch.trial import Place, TrialPlan, write_unstarted
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult
from zerotune.trial_lib.search.base import Search
from zerotune.trial_lib.search.methods import METHODS
from zerotune.trial_lib.study.advice import Advice
from zerotune.trial_lib.study.arguments import StudyTime, metric_with
from zerotune.trial_lib.study.fingerprint import Edits
from zerotune.trial_lib.study.folder import folder_error_told
from zerotune.trial_lib.study.history import (
    PROFILE_NUMBER,
    SUBMITTED_NUMBER,
    Asked,
    AskedSweep,
    Event,
    History,
    Proposal,
    Stopped,
    StudyState,
    Told,
    Withdrawn,
    stays_open,
    unfinished_work,
    unrecorded_ends,
)
from zerotune.trial_lib.study.open_search import open_search, why_micro_batch_is_kept
from zerotune.trial_lib.study.plans import TrialPlans, on_same_devices, submitted_candidate, throughput_to_beat
from zerotune.trial_lib.study.profile import own_reading, profiled_candidate, run_profile_of_study
from zerotune.trial_lib.study.program import CommandChanges, KnownProgram
from zerotune.trial_lib.study.runner import (
    Admission,
    MeasuredConfigs,
    Runner,
    SecondTries,
    Work,
    WorkEnd,
    seconds_of,
)
from zerotune.trial_lib.study.setup import StudySetup, is_measured_beside

# An ended trial takes up to some seconds. One that takes longer waits for something, such as a build.
_END_S = 10.0


class StudyDriver:
    """Runs the trials of one study.

    One thread asks for work and tells its ends. Only `run` and `cancel` may be called from other threads.
    """

    def __init__(self, setup: StudySetup, place: Place, log: logging.Logger) -> None:
        self.setup, self.place, self.log = setup, place, log
        self.state = StudyState()
        self.known = KnownProgram.of(setup.experiment, setup.environment)
        self.search: Search | None = None  # until the first candidate is asked for
        self.edits = Edits(setup.experiment, setup.arguments.include, setup.paths, log)
        self.advice = Advice(setup, log)
        self._changes = CommandChanges(log)
        self.plans = TrialPlans(setup)
        self._admission = Admission(setup)
        profile = partial(run_profile_of_study, setup, place)
        self._runner = Runner(place, log, self._admission.why_not, self._starting, profile)
        self._measured, self._second = MeasuredConfigs(), SecondTries()
        self._best: TrialResult | None = None
        self.history = History(setup.paths.history)
        self._replay(self.history.replayed)
        confirms = METHODS[setup.arguments.method].confirms_winner
        self.time = StudyTime(setup.arguments.max_minutes, seconds_of(self.state.results.values()), confirms)
        self._ended_at: float | None = None

    @property
    def metric(self) -> str:
        """The metric that the study goes by. It is another than the user asked for if that is no figure."""
        return metric_with(self.setup.arguments.metric, self.state.profile)

    @property
    def untuned_batch(self) -> str:
        if not METHODS[self.setup.arguments.method].has_batch_policy:
            return ""
        program = None if self.state.profile is None else self.state.profile.program
        return untuned_batch(self.state, why_micro_batch_is_kept(self.setup.arguments, program))

    @property
    def ignored_batch(self) -> str:
        """Why no trial can be measured, because the program ignores its micro-batch size. Empty if it does not."""
        return "" if self.untuned_batch else ignored_batch_reason(self.state) or ""

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the search has left out, in sentences."""
        return (*filter(None, [self.untuned_batch]), *(() if self.search is None else self.search.left_out))

    # -- what to run ---------------------------------------------------------------------------------------------

    def profile_plan(self) -> TrialPlan:
        """The profile trial measures one step with the smallest micro-batch that the program takes."""
        plan = self._decide(PROFILE_NUMBER, Purpose.PROFILE, Candidate(micro_batch_size=1, slots=self.setup.slots))
        return replace(plan, with_own=is_measured_beside(self.setup))

    def submitted_plan(self) -> TrialPlan | None:
        """The trial of the user's configuration; None if the user's code decides on its batch."""
        profile, _ = self.state.profiled
        try:
            candidate = submitted_candidate(self.known.base_config, self.setup.slots, profile.profile)
        except InputError as error:
            self.log.warning("your configuration is not measured: %s", error)
            return None
        return replace(self._decide(SUBMITTED_NUMBER, Purpose.SUBMITTED, candidate), traces=True)

    def measured_as_typed(self, submitted: TrialPlan) -> TrialResult | None:
        """The result of the user's configuration, if the profile trial has measured it."""
        profile, _ = self.state.profiled
        return own_reading(submitted, profile, self.setup.paths.trial(PROFILE_NUMBER))

    def plan_again(self, purpose: Purpose, candidate: Candidate) -> TrialPlan:
        """Another trial of a candidate. A confirming trial that was cut short gets its number again."""
        last = max(self.state.candidates)
        is_open = self.state.purposes[last] is purpose is Purpose.CONFIRM and last in self.state.running
        plan = self._decide(last if is_open else self.state.next_number, purpose, candidate)
        return on_same_devices(plan, self.state.results.values())

    def next_work(self, room: int) -> list[Work]:
        """Up to `room` pieces of work to start now. Work that has waited comes before new candidates."""
        found: list[Work] = []
        while len(found) < room and not self.ignored_batch:
            proposal = self._admission.next(self._ask)
            if proposal is None:
                break
            plans = self._new_plans(proposal)
            if plans:
                found.append(Work(tuple(plans), proposal.sweep if len(plans) > 1 else None))
                self._admission.started(plans)
        return found

    def _new_plans(self, proposal: Proposal) -> list[TrialPlan]:
        # The plans of the candidates that no trial has measured. The search gets the others' results.
        plans = []
        method, alone = self.setup.arguments.method, proposal.sweep is None
        to_beat = throughput_to_beat(method, self.metric, self._best) if alone else None
        for number, candidate in proposal.numbered:
            known = self._measured.known(candidate.config_hash(self.known.base_config), candidate)
            plan = self._plan(number, Purpose.SEARCH, candidate)
            if known is None:
                plans.append(replace(plan, to_beat=to_beat))
            else:
                self._tell_known(plan, self.state.results[known])
        return plans

    def _tell_known(self, plan: TrialPlan, known: TrialResult) -> None:
        # Ends a trial with the result of another. One configuration is not run twice because it has two names.
        result = replace(
            known, number=plan.number, name=plan.name, purpose=plan.purpose, trial_id=plan.trial_id, phases={}
        )
        write_unstarted(plan, result)
        self.log.info("trial %d is the same configuration as trial %d", plan.number, known.number)
        self.tell(result)

    def _ask(self) -> Proposal | None:
        if self.time.is_over_for_search:
            return None
        if self._second.waiting:
            return self._ask_again(self._second.waiting[0])
        is_first, search = self.search is None, self._searching()
        asked: Candidate | Sweep | None = self.advice.head_start.winner(search.problem) if is_first else None
        if asked is None:
            asked = search.ask()
        else:
            search.apply(asked)
        if asked is None:
            return None
        number = self.state.next_number
        event = AskedSweep(number, asked) if isinstance(asked, Sweep) else Asked(number, Purpose.SEARCH, asked)
        self._write(event)
        return event.proposal

    def _ask_again(self, candidate: Candidate) -> Proposal:
        event = Asked(self.state.next_number, Purpose.SEARCH, candidate)
        self._write(event)
        self._second.begins(candidate)
        self.log.info("trial %04d runs once more what has failed, because that may be chance", event.number)
        return event.proposal

    def _decide(self, number: int, purpose: Purpose, candidate: Candidate) -> TrialPlan:
        if number not in self.state.candidates:
            self._write(Asked(number, purpose, candidate))
        return self._plan(number, purpose, candidate)

    def _plan(self, number: int, purpose: Purpose, candidate: Candidate) -> TrialPlan:
        profiled = None if purpose is Purpose.PROFILE else self.state.profiled
        return self.plans.plan(number, purpose, candidate, self.known, profiled, self.state.names[number])

    def _searching(self) -> Search:
        # The search, which is opened for its first candidate.
        if self.search is None:
            advice, sweeps = self.advice, self.place.can_sweep
            known = [*self.state.begun, *advice.head_start.trials()]
            self.search = open_search(
                self.setup, self.known.base_config, sweeps, known, self.log, advice.foreseen, advice.expected
            )
        return self.search

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, work: Work) -> list[WorkEnd]:
        """Runs work to its end. Call it from a thread of the work's own. `next_ended` returns its ends as well."""
        return self._runner.run(work)

    def run_beside(self, plan: TrialPlan) -> TrialResult:
        """Runs a plan that is no trial of the study. Its history does not have it."""
        return self.place.run_trial(plan, self._runner.cancelled, self.log.info)

    def begin_profile(self) -> None:
        """Begins the profile trial and returns at once, so that it runs while Prefect's server starts.

        `run` then waits for its end. A study that has a profile begins nothing, nor does one on a Ray cluster, whose
        trials are task runs. A folder without room for its record raises FolderError.
        """
        if self.state.profile is None and self.setup.arguments.ray_address is None:
            with folder_error_told(self.setup.paths.root):
                self._runner.begin(Work((self.profile_plan(),)))

    def await_begun(self, timeout_s: float) -> None:
        self._runner.await_begun(timeout_s)

    def next_ended(self, timeout_s: float) -> WorkEnd | None:
        """Waits for a trial to end; None if none has within the time-out. Meanwhile the caller can check signals.

        When the study's time is over, it ends all trials, and soon everything that they may wait for, such as a build.
        A study that has lost its folder raises FolderError.
        """
        self.history.check()
        if self.time.is_over and not self._runner.cancelled.is_set():
            self.log.info("The minutes of --max-minutes are over. What still runs is ended.")
            self._ended_at = time.monotonic()
            self.cancel()
        elif self._ended_at is not None and time.monotonic() > self._ended_at + _END_S:
            self._ended_at = math.inf  # once
            self.place.close()
        return self._runner.next_ended(timeout_s)

    def lose(self, work: Work, reason: str) -> None:
        """Ends the trials of work whose thread has died. Trials that have ended already keep their results."""
        self._runner.lose([plan for plan in work.plans if plan.number in self.state.running], reason)

    def prime(self) -> None:
        """Lets the fork server import the modules that the trials need, and waits for it."""
        if self.state.profile is not None:
            self.place.prime([*self.state.profile.imported, *self.known.imported_later])

    def cancel(self) -> None:
        self._runner.cancelled.set()

    def _starting(self, plan: TrialPlan) -> None:
        self.edits.look()
        if not plan.as_typed:
            self._changes.tell(plan.number, plan.program)

    # -- how it ended --------------------------------------------------------------------------------------------

    def tell(self, end: WorkEnd) -> None:
        """Records how a trial ended. One that was cut short stays open, and a resumed study runs it again."""
        self._admission.ended(end.number)
        if isinstance(end, Withdrawn):
            if not self._runner.cancelled.is_set() or self._ended_at is not None:
                self._write(end)
            return
        if end.outcome is Outcome.CANCELLED and self._ended_at is not None:
            if end.purpose is Purpose.CONFIRM:
                # It says nothing about its configuration.
                self._write(Withdrawn(end.number, Withdrawal.ENDED))
                return
            end = replace(end, outcome=Outcome.TIMED_OUT, reason=self.time.told)
            write_whole(self.setup.paths.trial(end.number).result, end.to_text())
        if stays_open(end):
            return
        self._write_end(end)
        if end.purpose is Purpose.PROFILE:
            self.prime()
        self.advice.compare(self.state, self.known.base_config)

    def stop(self, reason: str) -> None:
        """Records the end of the search."""
        if not self.state.has_searched:
            for sentence in self.left_out:
                self.log.warning("%s", sentence)
            self._write(Stopped(reason))

    def _write_end(self, result: TrialResult) -> None:
        if result.purpose is Purpose.PROFILE:
            measured = profiled_candidate(self.setup.paths.trial(result.number).candidate)
            if measured is not None and measured != self.state.candidates[result.number]:
                self._write(Asked(result.number, result.purpose, measured))
        self._write(Told(result.number, result))

    def _write(self, event: Event) -> None:
        # Appends an event to the history, and takes it in.
        self.history.append(event)
        self._take_in(event)

    def _take_in(self, event: Event) -> None:
        # Applies an event, new or replayed, to the state. The search learns of the ends of its trials.
        if isinstance(event, Withdrawn) and self.state.purposes[event.number] is Purpose.SEARCH:
            self._searching().withdraw(self.state.candidates[event.number], event.reason)
        self.state.apply(event)
        if isinstance(event, Told):
            self._learn(event.result)

    def _learn(self, result: TrialResult) -> None:
        if result.purpose is Purpose.PROFILE:
            if result.program is not None:
                keep_secret(KnownSecrets.within(result.program.ds_config or {}))
                self.known = self.known.learned(result.program)
            self.advice.profiled(result, self.known.base_config)
            self._admission.profiled(result.profile, self.known.base_config, self.advice.foreseen)
            return
        # Of thousands of trials, not all are looked at for each new one.
        self._best = best_result(filter(None, (self._best, result)), self.metric)
        candidate = self.state.candidates[result.number]
        is_of_search = result.purpose is Purpose.SEARCH
        if is_of_search and self.untuned_batch:
            self._searching().keep_size(self.state.candidates[PROFILE_NUMBER].micro_batch_size)
        if is_of_search and self._second.takes(candidate, result, self._searching().spend):
            return
        self._measured.add(result, candidate)
        if is_of_search:
            self._searching().tell(candidate, result)

    def _replay(self, events: Sequence[Event]) -> None:
        # Brings a resumed study to where it was. Recorded asks are applied, and ended trials do not run again.
        proposals: list[Proposal] = []
        for event in events:
            self._take_in(event)
            if isinstance(event, AskedSweep):
                self._searching().apply(event.sweep)
                proposals.append(event.proposal)
            elif isinstance(event, Asked) and event.purpose is Purpose.SEARCH:
                if not self._second.begins(event.candidate):
                    self._searching().apply(event.candidate)
                proposals.append(event.proposal)
        for result in unrecorded_ends(self.setup.paths, self.state.running):
            self._write_end(result)
        self._admission.waiting, given_up = unfinished_work(proposals, self.state.results, self.state.withdrawn)
        for withdrawn in given_up:
            self.tell(withdrawn)


def best_result(results: Iterable[TrialResult], metric: str) -> TrialResult | None:
    """The completed trial with the best metric, or None. Of equal ones it is the earlier.

    The trial of the user's configuration counts, and the profile trial does not.
    """
    best: TrialResult | None = None
    for result in results:
        if result.outcome is not Outcome.COMPLETED or result.purpose is Purpose.PROFILE or metric not in result.metrics:
            continue
        if best is None or SEARCH_METRICS[metric].better(result.metrics[metric], than=best.metrics[metric]):
            best = result
    return best


def ignored_batch_reason(state: StudyState) -> str | None:
    """Why the program ignores the requested micro-batch size, or None if it does not.

    The program ignores it if no larger size than the profile trial's has ever arrived. The profile trial cannot show
    that for a program that has its own size in its code.
    """
    results, candidates = state.results, state.candidates
    profiled = 1 if state.profile is None else candidates[PROFILE_NUMBER].micro_batch_size
    ignored = None
    for number, result in results.items():
        if candidates[number].micro_batch_size <= profiled or result.purpose is Purpose.SUBMITTED:
            continue
        if result.outcome is Outcome.COMPLETED:
            return None
        if ignored is None and result.outcome is Outcome.INVALID and result.micro_batch_arrived == profiled:
            ignored = result.reason
    return ignored


def untuned_batch(state: StudyState, kept: str = "") -> str:
    """Why only the program's own micro-batch size is measured, in sentences; empty if others are.

    A program that ignores the requested size can be tuned in everything else, if what was typed agrees with what
    arrives. The profile trial has shown that it does, or the first trial of a larger size has. `kept`: why the study
    keeps it otherwise.
    """
    program = None if state.profile is None else state.profile.program
    typed = None if program is None else program.typed_batch
    if program is None or typed is None:
        return ""
    size = typed.micro_batch_size
    agrees = program.rows_per_sample == 1 and size == state.candidates[PROFILE_NUMBER].micro_batch_size
    reason = program.fixed_batch or kept or (ignored_batch_reason(state) if agrees else None)
    return f"The micro-batch was not tuned and stays {size}. {reason}" if reason else ""
