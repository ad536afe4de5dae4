"""What a study's plan foresees for its trials, kept beside what they measure."""

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
from zerotune.trial_lib.search.allocations import needed_above_initialize
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel, measured_above_initialize
from zerotune.trial_lib.study.history import StudyState
from zerotune.trial_lib.study.study_plan import StudyPlan

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
