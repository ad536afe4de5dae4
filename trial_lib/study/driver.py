"""The driver of a study: decides on trials, runs them, remembers how they ended."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trial_lib.device.host.base import Host
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.launch.place import Place
from trial_lib.launch.trial import TrialPlan, write_unstarted
from trial_lib.records.candidate import Candidate, Purpose, Sweep
from trial_lib.records.result import ProgramProfile, TrialResult
from trial_lib.records.study_folder import StudyPaths
from trial_lib.search.base import Search
from trial_lib.secrets.by_value import KnownSecrets, keep_secret
from trial_lib.study.admission import Admission
from trial_lib.study.answer import best_result, ignored_batch_reason, write_answer
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.build_program import CommandChanges, environment_of
from trial_lib.study.earlier.earlier_studies import earlier_studies_of
from trial_lib.study.earlier.fingerprint import fingerprint_in
from trial_lib.study.earlier.head_start import HeadStart
from trial_lib.study.kept.edits import Edits
from trial_lib.study.kept.history import Asked, AskedSweep, Decided, Event, History, Stopped, Told, Withdrawn
from trial_lib.study.known_program import KnownProgram
from trial_lib.study.measured_configs import MeasuredConfigs
from trial_lib.study.opening.mapped_values import held_against, mapped_places
from trial_lib.study.opening.needed_ops import with_ops_built
from trial_lib.study.opening.open_search import kept_batch, open_search
from trial_lib.study.plans import TrialPlans, on_same_devices, submitted_candidate, throughput_to_beat
from trial_lib.study.profiling import profile_candidate, run_profile
from trial_lib.study.runner import Runner, Work, WorkEnd, seconds_of
from trial_lib.study.state import PROFILE_NUMBER, SUBMITTED_NUMBER, StudyState
from trial_lib.study.study_metric import metric_with
from trial_lib.study.unfinished import left_of, stays_open, unheard
from trial_lib.wire.errors import InputError


class StudyDriver:
    """Runs the trials of one study.

    Only the thread that asks and tells may call its methods, but for `run` and `cancel`.

    Args:
        study_id: unique over all studies.
        opened_at: seconds since the epoch: no trial changes a file of the user's that is older.
        experiment: what the user submitted.
        arguments: the study's.
        paths: its files.
        host: the devices.
        place: where the trials run.
        log: for people; goes to the study's log file.

    Attributes:
        environment: what the ranks start from.
        arguments: the study's; the metric is the one that it goes by.
        metric_is_replaced: whether that is another than was asked for.
        full_experiment_failure: why the full experiment failed, if it has.
        state: its history, folded.
    """

    def __init__(
        self,
        study_id: str,
        opened_at: float,
        experiment: Experiment,
        arguments: StudyArguments,
        paths: StudyPaths,
        host: Host,
        place: Place,
        log: logging.Logger,
    ) -> None:
        self.study_id = study_id
        self.experiment = experiment
        self._known = KnownProgram.of(experiment)
        self.arguments = arguments
        self.paths = paths
        self.host = host
        self.log = log
        self.search: Search | None = None
        self.full_experiment_failure: str | None = None
        self._earlier = earlier_studies_of(paths)
        self.place = place
        self.metric_is_replaced = False
        self._opened = time.monotonic()
        # As it is now: what Prefect and MLflow set in this process later is not the ranks' business.
        self.environment = environment_of(experiment, arguments.include, host.device)
        self._changes = CommandChanges(experiment, self.environment, log)
        self._plans = TrialPlans(study_id, opened_at, experiment, arguments, paths, host, self.environment)
        self._edits = Edits(experiment, arguments.include, paths, log)
        self._admission = Admission(experiment, arguments, host)
        self._runner = Runner(place, log, self._admission.why_not, self._starting, self._run_profile)
        self._history = History(paths.history)
        self.state = StudyState()
        self._measured = MeasuredConfigs()
        self._replay()
        self._seconds_before = seconds_of(self.state.results.values())

    # -- what to run ---------------------------------------------------------------------------------------------

    @property
    def concurrency(self) -> int:
        """Trials that may run at once."""
        slots = self.arguments.max_slots or len(self.host.slots)
        per_trial = self.experiment.config.resources.slots_per_trial
        return max(1, min(self.arguments.max_concurrent_trials, self.arguments.max_trials, slots // per_trial))

    def profile_plan(self) -> TrialPlan:
        """Returns the profile trial: one step with a micro-batch of 1, if the program can, and all else as typed."""
        slots = self.experiment.config.resources.slots_per_trial
        return self._decide(PROFILE_NUMBER, Purpose.PROFILE, Candidate(micro_batch_size=1, slots=slots))

    def _run_profile(self, plan: TrialPlan, run: Callable[[TrialPlan], TrialResult]) -> TrialResult:
        def plan_for(program: ProgramProfile, size: int) -> TrialPlan:
            known = self._known.learned(program)
            candidate = profile_candidate(program, size, plan.candidate.slots, known.arg_mappings)
            return self._plans.plan(plan.number, plan.purpose, candidate, known, None)

        def run_and_compare(plan: TrialPlan) -> TrialResult:
            result = run(plan)
            if not plan.as_typed:
                return result
            places = mapped_places(self.experiment, self.environment)
            return held_against(result, places, self.experiment.config.arg_mappings)

        typed, device = self._plans.typed(plan, self.base_config), self.host.device
        profiled = run_profile(plan, typed, plan_for, run_and_compare, self.place.prime)
        return with_ops_built(profiled, self.experiment, self.arguments, device, self.place.build)

    def submitted_plan(self) -> TrialPlan | None:
        """Returns the trial of the user's configuration as it is; None where its batch is for the code to decide."""
        slots = self.experiment.config.resources.slots_per_trial
        try:
            candidate = submitted_candidate(self.base_config, slots, self._profile.profile)
        except InputError as error:
            self.log.warning("your configuration is not measured: %s", error)
            return None
        return self._decide(SUBMITTED_NUMBER, Purpose.SUBMITTED, candidate)

    @property
    def ignored_batch(self) -> str | None:
        """Why nothing but batches of 1 arrives, whatever is asked for; None where larger ones do."""
        return ignored_batch_reason(self.state.results, self.state.candidates)

    def next_work(self, room: int) -> list[Work]:
        """Returns up to `room` pieces of work to start now: first what has waited, then what the search asks."""
        found: list[Work] = []
        while len(found) < room and self.ignored_batch is None:
            decided = self._admission.next(self._ask)
            if decided is None:
                break
            plans = []
            to_beat = throughput_to_beat(self.arguments, self.best) if decided.sweep is None else None
            for number, candidate in decided.numbered:
                known = self._measured.known(candidate.config_hash(self.base_config), candidate)
                if known is None:
                    plans.append(replace(self._plan(number, Purpose.SEARCH, candidate), to_beat=to_beat))
                else:
                    self._tell_known(number, self.state.results[known])
            if plans:
                found.append(Work(tuple(plans), decided.sweep if len(plans) > 1 else None))
                self._admission.started(plans)
        return found

    def _ask(self) -> Decided | None:
        if self.minutes_are_over:
            return None
        is_first, search = self.search is None, self._searching()
        asked: Candidate | Sweep | None = self.known_winner if is_first else None
        if asked is None:
            asked = search.ask()
        else:
            search.apply(asked)
        if asked is None:
            return None
        first = self.state.next_number
        event = AskedSweep(first, asked) if isinstance(asked, Sweep) else Asked(first, Purpose.SEARCH, asked)
        self._write(event)
        return event.decided

    @property
    def head_start(self) -> HeadStart:
        """What earlier studies give this one to begin with."""
        return HeadStart(self._earlier, fingerprint_in(self.paths), self.state.profile)

    @property
    def known_winner(self) -> Candidate | None:
        """What the search starts from, once it is open; None where no earlier study has anything."""
        if self.search is None or self.state.profile is None or self.state.profile.profile is None:
            return None
        batch = kept_batch(self.arguments, self.base_config, self.state.profile.profile, self.log)
        return self.head_start.winner(self.search.space, batch, self.experiment.config.resources.slots_per_trial)

    @property
    def minutes_are_over(self) -> bool:
        """Whether the time that the search may take is over; what a study took before it was resumed counts."""
        minutes = self.arguments.max_minutes
        return minutes is not None and time.monotonic() - self._opened + self._seconds_before >= 60 * minutes

    def plan_again(self, purpose: Purpose, candidate: Candidate) -> TrialPlan:
        """Returns another trial of a candidate, to confirm or to record it; one of a confirmation cut short goes on."""
        number = max(self.state.candidates)
        is_open = self.state.purposes[number] is purpose is Purpose.CONFIRM and number not in self.state.results
        plan = self._decide(number if is_open else self.state.next_number, purpose, candidate)
        return on_same_devices(plan, self.state.results.values())

    def _tell_known(self, number: int, result: TrialResult) -> None:
        """Tells the search what is known already: a configuration is not run twice for having two names."""
        plan = self._plan(number, Purpose.SEARCH, self.state.candidates[number])
        again = result.model_copy(
            update={
                "number": number,
                "name": plan.name,
                "purpose": plan.purpose,
                "trial_id": plan.trial_id,
                "phases": {},
            }
        )
        write_unstarted(plan, again)
        self.log.info("trial %d is the same configuration as trial %d", number, result.number)
        self.tell(again)

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, work: Work) -> list[WorkEnd]:
        """Runs work; how it ended waits for `next_ended` too. Called from a thread of the work's own."""
        return self._runner.run(work)

    def next_ended(self, timeout_s: float) -> WorkEnd | None:
        """Waits for a trial to end; None if none has within the time-out, which lets the main thread hear signals."""
        return self._runner.next_ended(timeout_s)

    def lose(self, work: Work, reason: str) -> None:
        """Has work whose thread has ended without a word end after all; harmless where it has said all it had to."""
        told = self.state.results.keys() | self.state.withdrawn.keys()
        self._runner.lose([plan for plan in work.plans if plan.number not in told], reason)

    @property
    def edited(self) -> str:
        """What somebody has edited while the study ran, in a sentence; empty where nobody has."""
        self._edits.look()
        return self._edits.sentence

    def _starting(self, plan: TrialPlan) -> None:
        self._edits.look()
        if not plan.as_typed:
            self._changes.tell(plan.number, plan.paths.ds_config, plan.ds_config, self.arg_mappings)

    def write_answer(self, number: int, measured: Mapping[str, Any]) -> None:
        """Writes the configuration of the winning trial, what it measured, and the command to train with it."""
        write_answer(
            self.experiment,
            self.state.candidates[number],
            measured,
            self.paths,
            self.host.device,
            self.environment,
            self._known,
        )

    def prime(self) -> None:
        """Has the starter import what the profile trial had imported, if there is one; waits for its server."""
        if self.state.profile is not None:
            self.place.prime(self.state.profile.imported)

    def cancel(self) -> None:
        """Ends all trials that run. Callable from any thread."""
        self._runner.cancelled.set()

    def tell(self, end: WorkEnd) -> None:
        """Takes in how a trial ended. One that was cut short stays open in the history: a resumed study runs it."""
        self._admission.ended(end.number)
        if isinstance(end, Withdrawn):
            if not self._runner.cancelled.is_set():
                self._write(end)
            return
        if stays_open(end):
            return
        if end.purpose is Purpose.PROFILE:
            self._note_profiled(end)
        self._write(Told(end.number, end))
        if end.purpose is Purpose.PROFILE:
            self.prime()

    def _note_profiled(self, profile: TrialResult) -> None:
        """Notes what the profile trial has run with in the end, where that is not what was wished for."""
        with contextlib.suppress(OSError, ValueError):
            ran = Candidate.model_validate_json(self.paths.trial(profile.number).candidate.read_text())
            if ran != self.state.candidates[profile.number]:
                self._write(Asked(profile.number, profile.purpose, ran))

    def stop(self, reason: str) -> None:
        """Notes the end of the search."""
        if not self.state.has_searched:
            for sentence in () if self.search is None else self.search.left_out:
                self.log.warning("%s", sentence)
            self._write(Stopped(reason))

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def base_config(self) -> dict[str, Any]:
        """The user's DeepSpeed configuration; where it stands in their code, empty until the profile trial has run."""
        return self._known.base_config

    @property
    def arg_mappings(self) -> dict[str, str]:
        """By which flag or variable the program takes its batch, the experiment's and what was found."""
        return self._known.arg_mappings

    @property
    def best(self) -> TrialResult | None:
        """The best reading so far, the user's configuration's included."""
        return best_result(self.state.results.values(), self.arguments.metric)

    @property
    def memory_limit(self) -> int | None:
        """The budget of a CPU slot, in bytes; None on a GPU."""
        return self._plans.memory_limit

    def had_engine(self, result: TrialResult) -> bool:
        """Returns whether every rank of a trial had come to a DeepSpeed engine."""
        paths, slots = self.paths.trial(result.number), self.experiment.config.resources.slots_per_trial
        return any(all(run.engine_built(rank).exists() for rank in range(slots)) for run in (paths, paths.as_typed))

    @property
    def _profile(self) -> TrialResult:
        return self.state.results[PROFILE_NUMBER]

    def _searching(self) -> Search:
        if self.search is None:
            own = [number for number in (PROFILE_NUMBER, SUBMITTED_NUMBER) if number in self.state.results]
            known = [
                (self.state.candidates[number], self.state.results[number]) for number in own
            ] + self.head_start.trials()
            self.search = open_search(
                self.arguments,
                self.experiment,
                self.base_config,
                self.host.device,
                self.concurrency,
                self.place.can_sweep,
                known,
                self.log,
            )
        return self.search

    # -- history -------------------------------------------------------------------------------------------------

    def _write(self, event: Event) -> None:
        """Appends an event to the history, and takes it in."""
        self._history.append(event)
        self._take_in(event)

    def _take_in(self, event: Event) -> None:
        """Applies an event, new or replayed, to the state. The search learns of the end of its trials."""
        if isinstance(event, Withdrawn):
            self._searching().withdraw(self.state.candidates[event.number], event.reason)
        self.state.apply(event)
        if isinstance(event, Told):
            self._learn(event.result)

    def _replay(self) -> None:
        """Brings a resumed study to where it was: asks are applied, not asked again, and ended trials are not run."""
        decided: list[Decided] = []
        for event in self._history.replayed:
            self._take_in(event)
            if isinstance(event, AskedSweep):
                self._searching().apply(event.sweep)
                decided.append(event.decided)
            elif isinstance(event, Asked) and event.purpose is Purpose.SEARCH:
                self._searching().apply(event.candidate)
                decided.append(event.decided)
        for result in unheard(self.paths, self.state.running):
            if result.purpose is Purpose.PROFILE:
                self._note_profiled(result)
            self._write(Told(result.number, result))
        self._admission.waiting, given_up = left_of(decided, self.state.results, self.state.withdrawn)
        for withdrawn in given_up:
            self.tell(withdrawn)

    def _learn(self, result: TrialResult) -> None:
        if result.purpose is Purpose.PROFILE:
            if result.program is not None:
                keep_secret(KnownSecrets.within(result.program.ds_config or {}))
                self._known = self._known.learned(result.program)
            self._admission.profiled(result.profile, self.base_config)
            metric = metric_with(self.arguments.metric, result)
            self.metric_is_replaced = metric != self.arguments.metric
            self.arguments = self.arguments.model_copy(update={"metric": metric})
            return
        self._measured.add(result, self.state.candidates[result.number])
        if result.purpose is Purpose.SEARCH:
            self._searching().tell(self.state.candidates[result.number], result)

    def _decide(self, number: int, purpose: Purpose, candidate: Candidate) -> TrialPlan:
        if number not in self.state.candidates:
            self._write(Asked(number, purpose, candidate))
        return self._plan(number, purpose, candidate)

    def _plan(self, number: int, purpose: Purpose, candidate: Candidate) -> TrialPlan:
        profiled = None if purpose is Purpose.PROFILE else (self._profile, self.state.candidates[PROFILE_NUMBER])
        return self._plans.plan(number, purpose, candidate, self._known, profiled, self.state.names[number])
