"""What a study's plan foresees for its trials, kept beside what they measure."""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from trial_lib.device.this_host import kind_of
from trial_lib.messages.files import write_whole
from trial_lib.messages.foreseen_run import ForeseenRun
from trial_lib.plan.devices import CONSTANTS, Cluster, Constant, DeviceSpeed, Efficiencies
from trial_lib.plan.step_time import foresee_step
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.planned_trials import PlannedTrial, PlannedTrials
from trial_lib.records.result import Memory, ModelProfile, Outcome, TrialResult
from trial_lib.search.allocations import needed_above_initialize
from trial_lib.search.budgets import MemoryBasis
from trial_lib.search.memory_model import MemoryModel, measured_above_initialize
from trial_lib.study.foreseen_arms import ForeseenSteps
from trial_lib.study.history import StudyState
from trial_lib.study.study_plan import StudyPlan

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
            measured_on=plan.speed.study_id if plan.speed is not None and plan.cluster is not None else "",
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
        cluster, known = self._plan.cluster, self._plan.speed
        speed = None if cluster is None else foresee_step(run, cluster, None if known is None else known.constants)
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


# The constants of the foreseen time, fitted to measured steps

NOISE = 0.06
_ROUNDS, _LONGEST = 12, 0.5
# A step grows with these constants, and shrinks with the others.
_SIGNS = {"launch": 1.0, "collective": 1.0, "module": 1.0, "whole": 1.0}


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was both foreseen and measured."""

    run: ForeseenRun  # the foreseen run
    cluster: Cluster  # that it was measured on
    seconds: float  # of an optimizer step, measured
    noise: float = NOISE  # the standard deviation of its logarithm from the best of these models, from arm to arm


def refit(measured: Sequence[MeasuredStep], prior: Efficiencies | None = None) -> Efficiencies:
    """The constants given measured steps of one kind of device, with what remains unknown about each.

    `prior` is what was known before. Fit all steps at once, not some on top of others.
    """
    start = prior or Efficiencies()
    if not measured:
        return start
    noise = np.array([each.noise for each in measured])
    logs = np.log([each.seconds for each in measured])
    spreads = np.array([getattr(start, name).spread for name in CONSTANTS])
    shifts = np.zeros(len(CONSTANTS))
    slopes = np.zeros((len(measured), len(CONSTANTS)))
    for _ in range(_ROUNDS):
        constants = start.changed(dict(zip(CONSTANTS, shifts.tolist(), strict=True)))
        steps = [foresee_step(each.run, each.cluster, constants) for each in measured]
        here = np.log([each.seconds for each in steps])
        slopes = np.array([[_SIGNS.get(name, -1.0) * step.shares[name] for name in CONSTANTS] for step in steps])
        # Least squares of the measurements, weighted by the noise, and of the shifts, weighted by their spreads.
        rows = np.vstack([slopes / noise[:, None], np.diag(1.0 / spreads)])
        wanted = np.concatenate([(logs - here) / noise, -shifts / spreads])
        change = np.clip(np.linalg.lstsq(rows, wanted, rcond=None)[0], -_LONGEST, _LONGEST)
        shifts = shifts + change
        if float(np.abs(change).max()) < 1e-3:
            break
    weighted = slopes / noise[:, None]
    covariance = np.linalg.inv(weighted.T @ weighted + np.diag(1.0 / spreads**2))
    moved = start.changed(dict(zip(CONSTANTS, shifts.tolist(), strict=True)))
    values: dict[str, Any] = {
        name: Constant(getattr(moved, name).value, math.sqrt(float(covariance[index, index])))
        for index, name in enumerate(CONSTANTS)
    }
    # Another arm is off by as much as these are from the model.
    values["whole"] = Constant(values["whole"].value, math.hypot(values["whole"].spread, float(np.median(noise))))
    names = {each.cluster.device.name for each in measured}
    return replace(start, **values, measured=len(measured), device=names.pop() if len(names) == 1 else "")


# What later plans and studies learn of the devices' speed

# A fit foresees each of them a dozen times.
_MOST = 12


def learned_speed(
    foreseen: ForeseenSteps, study_id: str, state: StudyState, base_config: Mapping[str, Any]
) -> DeviceSpeed | None:
    """What a study that has ended shows of its devices' speed; None if they are no known ones, or no step was foreseen.

    All of its own steps are fitted at once, from the defaults. What an earlier study has learned is no prior, because
    its steps may be the same ones.
    """
    cluster = foreseen.cluster
    if cluster is None:
        return None
    steps = measured_steps(foreseen, cluster, state, base_config)
    if not steps:
        return None
    return DeviceSpeed(
        study_id=study_id,
        device=cluster.device.name,
        ended_at=time.time(),
        steps=len(steps),
        efficiencies=refit(steps).to_json(),
    )


def measured_steps(
    foreseen: ForeseenSteps, cluster: Cluster, state: StudyState, base_config: Mapping[str, Any]
) -> list[MeasuredStep]:
    """The optimizer steps of a study that were foreseen, one for each configuration."""
    runs: dict[str, tuple[str, ForeseenRun]] = {}
    seconds: dict[str, list[float]] = defaultdict(list)
    for number, result in state.results.items():
        speed = result.metrics.get("throughput", 0.0)
        if result.purpose not in _COMPARED or result.outcome is not Outcome.COMPLETED or speed <= 0:
            continue
        candidate = state.candidates[number]
        found = foreseen.of(candidate, base_config)
        if found is not None:
            key = candidate.config_hash(base_config)
            runs[key] = found
            seconds[key].append(found[1].micro_batch * found[1].accumulation * found[1].replicas / speed)
    arms: dict[str, int] = defaultdict(int)
    places = {}
    for key, (label, _) in runs.items():
        places[key] = arms[label]
        arms[label] += 1
    # Each arm shows other constants, so each comes before the second one of any.
    chosen = sorted(runs, key=lambda key: places[key])[:_MOST]
    return [MeasuredStep(runs[key][1], cluster, median(seconds[key])) for key in chosen]
