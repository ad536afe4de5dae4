"""Trials outside of a search: those of earlier studies, a profile trial alone, and a recorded table."""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import without_tuning_keys
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.inputs.yaml_document import read_yaml
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import STUDIES, StudyPaths, StudyRecord
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.earlier import trials_of
from zerotune.trial_lib.study.folder import record_of
from zerotune.trial_lib.study.open_study import OpenStudy
from zerotune.trial_lib.study.profile_report import had_engine, profile_failure
from zerotune.trial_lib.study.program import completed_config
from zerotune.trial_lib.study.runner import Work

Trial = tuple[Candidate, TrialResult]


@dataclass(frozen=True)
class KnownTrials:
    """Trials of one experiment on this host."""

    model_profile: ModelProfile  # the model, as the profile trial found it
    profile: Trial
    base_config: dict[str, Any]  # the user's DeepSpeed configuration, completed by the profile trial
    trials: tuple[Trial, ...] = ()  # the others that ended
    # Ids of their studies, that of the profile first. Empty if only a profile trial was run.
    studies: tuple[str, ...] = ()


class ProfileFailedError(Exception):
    """The profile trial did not complete. The message says why."""


def earlier_trials(experiment: Experiment, work_dir: Path) -> KnownTrials | None:
    """Returns the trials of the earlier studies of an experiment, or None.

    A study counts if its YAML, model directory and DeepSpeed configuration are the same, it ran on this host, and no
    Python file of the model directory has changed since it began.
    """
    found: list[KnownTrials] = []
    newest_code = max((path.stat().st_mtime for path in experiment.model_dir.rglob("*.py")), default=0.0)
    for paths in map(StudyPaths, (work_dir / STUDIES).glob("*")):
        record = record_of(paths)
        if record is None or record.started_at <= newest_code or not _is_of(record, paths, experiment):
            continue
        known = _trials_of(record, paths)
        if known is not None:
            found.append(known)
    if not found:
        return None
    found.sort(key=lambda known: known.profile[1].started_at, reverse=True)
    newest = found[0]
    return KnownTrials(
        newest.model_profile,
        newest.profile,
        newest.base_config,
        # Oldest first, as they were measured.
        trials=tuple(trial for known in reversed(found) for trial in known.trials),
        studies=tuple(study for known in found for study in known.studies),
    )


def run_profile(study: OpenStudy) -> KnownTrials:
    """Runs the profile trial of a study, and nothing else. Raises KeyboardInterrupt if it was cut short."""
    driver = study.driver
    plan = replace(driver.profile_plan(), with_own=False)
    (result,) = driver.run(Work((plan,)))
    assert isinstance(result, TrialResult)
    if result.outcome is Outcome.CANCELLED:
        raise KeyboardInterrupt
    if result.from_outside:
        raise ProfileFailedError(f"The profile trial could not be run to its end: {result.reason}")
    if result.outcome is not Outcome.COMPLETED:
        raise ProfileFailedError(profile_failure(result, had_engine(driver.setup, result)))
    driver.tell(result)
    assert result.profile is not None
    return KnownTrials(result.profile, (driver.state.candidates[plan.number], result), driver.known.base_config)


def _is_of(record: StudyRecord, paths: StudyPaths, experiment: Experiment) -> bool:
    return (
        record.name == experiment.name
        and Path(record.model_dir) == experiment.model_dir
        and _plain(record.ds_config) == _plain(experiment.ds_config)
        and paths.experiment.is_file()
        and experiment.path is not None
        and read_yaml(paths.experiment).data == read_yaml(experiment.path).data
    )


def _plain(config: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(config))


def _trials_of(record: StudyRecord, paths: StudyPaths) -> KnownTrials | None:
    # The trials of one study; None if its history is damaged or lacks a completed profile trial here.
    try:
        ended = [(trial.candidate, trial.result) for trial in trials_of(paths).values()]
    except (InputError, KeyError):
        return None
    profile = next((trial for trial in ended if trial[1].purpose is Purpose.PROFILE), None)
    trials = [trial for trial in ended if trial[1].purpose is not Purpose.PROFILE]
    if profile is None or profile[1].profile is None or profile[1].host != platform.node():
        return None
    program = profile[1].program
    base = without_tuning_keys(record.ds_config)
    return KnownTrials(
        profile[1].profile,
        profile,
        base if program is None else completed_config(base, program),
        tuple(trials),
        (record.study_id,),
    )
