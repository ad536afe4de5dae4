"""What a study knows of its trials before they run, from a plan and earlier studies, and what they measure then."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.plan.plan_record import PlannedTrial, PlannedTrials
from zerotune.trial_lib.plan.step_time import planned_step
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.allocations import ForeseenArm, needed_above_initialize
from zerotune.trial_lib.search.base import ExpectedArm
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel, measured_above_initialize
from zerotune.trial_lib.study.earlier import HeadStart, earlier_studies_of
from zerotune.trial_lib.study.fingerprint import fingerprint_in
from zerotune.trial_lib.study.history import StudyState
from zerotune.trial_lib.study.open_search import foreseen_in, keep_arms
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.study_plan import StudyPlan, study_plan


class Advice:
    """Advises the search of one study, and compares the advice with the trials.

    A resumed study gets the same advice, because everything is in its folder.
    """

    def __init__(self, setup: StudySetup, log: logging.Logger) -> None:
        self._setup, self._paths, self._log = setup, setup.paths, log
        hosts = max(1, len(setup.experiment.config.resources.hosts))
        # None without one, or if it is of another program.
        self.plan = study_plan(self._paths.plan, setup.host, setup.slots, hosts)
        self._against = None if self.plan is None else AgainstPlan(self.plan, self._paths.planned_trials)
        self._without_plan = ""
        self._earlier = earlier_studies_of(self._paths)
        self._profile: TrialResult | None = None

    @property
    def foreseen(self) -> tuple[ForeseenArm, ...]:
        """The memory of arms as the plan has it. A study of an earlier version may have foreseen it without a plan."""
        return self.plan.foreseen if self.plan is not None else foreseen_in(self._paths.foreseen)

    @property
    def expected(self) -> tuple[ExpectedArm, ...]:
        """The arms of the plan; none without one."""
        return () if self.plan is None else self.plan.expected

    @property
    def head_start(self) -> HeadStart:
        return HeadStart(self._earlier, fingerprint_in(self._paths), self._profile)

    def profiled(self, profile: TrialResult, base_config: Mapping[str, Any]) -> None:
        """Leaves the plan out if it is of another program than the profile trial has found."""
        self._profile = profile
        unlike = ""
        if self.plan is not None and profile.profile is not None:
            unlike = self.plan.unlike(profile.profile, base_config)
        if self.plan is not None and unlike:
            self._without_plan = self.plan.left_out(unlike)
            self.plan = self._against = None

    def tell_plan(self, has_search: bool) -> None:
        """Logs what the plan gives, or why the study goes on without it. Its memory is kept for the report."""
        if self._without_plan:
            self._log.warning("%s", self._without_plan)
        elif self.plan is not None and not has_search:
            for sentence in self.plan.told():
                self._log.info("%s", sentence)
            if self.plan.foreseen:
                keep_arms(self.plan.foreseen, self._paths.foreseen)

    def compare(self, state: StudyState, base_config: Mapping[str, Any]) -> None:
        """Compares the trials that have ended with the plan."""
        if self._against is not None:
            self._against.add(state, base_config)


# The plan beside the trials.

_COMPARED = (Purpose.SUBMITTED, Purpose.SEARCH, Purpose.CONFIRM)


class AgainstPlan:
    """Compares the trials of a study with the plan that it began with, in a file of the study."""

    def __init__(self, plan: StudyPlan, file: Path) -> None:
        self._plan = plan
        self._file = file
        empty = PlannedTrials(
            plan_id=plan.record.plan_id,
            devices=plan.devices.label,
            is_here=plan.cluster is not None,
            of_steps=kind_of(plan.device).computes_on_the_processor,
        )
        self._kept = PlannedTrials.in_file(file) or empty
        self._seen = {trial.number for trial in self._kept.trials}
        self._model: MemoryModel | None = None

    def add(self, state: StudyState, base_config: Mapping[str, Any]) -> None:
        """Adds the trials that have ended since. The profile trial has completed the user's configuration."""
        profile = state.profile.profile if state.profile is not None else None
        new = [result for number, result in state.results.items() if number not in self._seen]
        if profile is None or not new:
            return
        self._seen |= {result.number for result in new}
        found = [self._planned(result, state.candidates[result.number], base_config, profile) for result in new]
        trials = sorted((*self._kept.trials, *(each for each in found if each)), key=lambda trial: trial.number)
        if len(trials) > len(self._kept.trials):
            self._kept = self._kept.model_copy(update={"trials": tuple(trials)})
            write_whole(self._file, self._kept.model_dump_json(indent=1))

    def _planned(
        self, result: TrialResult, candidate: Candidate, base_config: Mapping[str, Any], profile: ModelProfile
    ) -> PlannedTrial | None:
        found = self._plan.run_of(candidate, base_config) if result.purpose in _COMPARED else None
        if found is None:
            return None
        label, run = found
        if self._model is None:
            plan = self._plan
            self._model = MemoryModel(MemoryBasis(profile, base_config, plan.slots, plan.device, plan.foreseen))
        needed, has_ended = self._model.allocations(candidate), result.outcome is Outcome.COMPLETED
        above = needed_above_initialize(needed)
        cluster = self._plan.cluster
        speed = None if cluster is None else planned_step(run, cluster)
        return PlannedTrial(
            number=result.number,
            label=label,
            micro_batch=candidate.micro_batch_size,
            memory=above if self._kept.of_steps else above + needed.initialize,
            measured_memory=self._measured(result.memory) if has_ended else None,
            samples_per_s=None if speed is None else speed.samples_per_s,
            low=None if speed is None else speed.samples_per_s * speed.seconds / speed.high,
            high=None if speed is None else speed.samples_per_s * speed.seconds / speed.low,
            measured_samples_per_s=result.metrics.get("throughput") if has_ended else None,
        )

    def _measured(self, memory: Memory) -> float | None:
        if self._kept.of_steps:
            return measured_above_initialize(memory)
        return max(memory.steps_peak or memory.peak, default=None)
