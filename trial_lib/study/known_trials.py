"""Trials outside of a search: those of earlier studies, a profile trial alone, and a recorded table."""

import json
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trial_lib.deepspeed_config.layout import Replicas
from trial_lib.deepspeed_config.overrides import ACCUMULATION, without_tuning_keys
from trial_lib.inputs.read_experiment import Experiment
from trial_lib.inputs.yaml_document import read_yaml
from trial_lib.messages.errors import InputError
from trial_lib.messages.files import drop_torn_tail
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.folders import STUDIES, StudyPaths, StudyRecord
from trial_lib.records.result import ModelProfile, Outcome, TrialResult
from trial_lib.records.table import RecordedTable, TableHead, TableRow, append_line, key_of, read_table
from trial_lib.search.allocations import ForeseenArm
from trial_lib.search.knobs import SearchSpace
from trial_lib.study.driver import StudyDriver
from trial_lib.study.earlier import record_of, trials_of
from trial_lib.study.open_study import OpenStudy
from trial_lib.study.profile_report import had_engine, profile_failure
from trial_lib.study.program import completed_config
from trial_lib.study.runner import Work

Trial = tuple[Candidate, TrialResult]


@dataclass(frozen=True)
class KnownTrials:
    """Trials of one experiment on this host, or what foreseen runs show in their place."""

    model_profile: ModelProfile  # the model, as the profile trial or a foreseen run found it
    profile: Trial | None  # the profile trial; None if the program was foreseen instead
    # The user's DeepSpeed configuration, completed by the profile trial or the foreseen run
    base_config: dict[str, Any]
    trials: tuple[Trial, ...] = ()  # the others that ended
    # Ids of their studies, that of the profile first. Empty if only a profile trial was run.
    studies: tuple[str, ...] = ()
    foreseen: tuple[ForeseenArm, ...] = ()  # the arms that foreseen runs have found


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
    found.sort(key=lambda known: 0.0 if known.profile is None else known.profile[1].started_at, reverse=True)
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


# A recorded table: every candidate of a grid is measured, one after another and alone.


def record_table(
    driver: StudyDriver,
    candidates: Sequence[Candidate],
    repeats: int,
    output: Path,
    tell: Callable[[int, int, Candidate, TrialResult], None],
) -> RecordedTable:
    """Measures every candidate and writes one line for each trial. An interrupted recording can be resumed.

    The repeats of a candidate are apart in time, and each pass has an order of its own. So a drift of the machine
    affects all candidates alike. A candidate that does not complete is not repeated. `tell` gets the numbers of
    finished and of all trials. Raises InputError if the file is no table, or belongs to another experiment.
    """
    assert driver.state.profile is not None
    assert driver.state.profile.profile is not None
    head = _head(driver)
    if not output.exists():
        append_line(output, head)
    table = read_table(output)
    for name in ("entrypoint", "base_config", "slots", "device", "memory_limit"):
        if getattr(table.head, name) != getattr(head, name):
            raise InputError(
                f"it belongs to another experiment: its {name} is {getattr(table.head, name)}.",
                where=str(output),
                remedy="Name another file.",
            )
    drop_torn_tail(output)
    total = len(candidates) * repeats
    for repeat in range(repeats):
        order = list(candidates)
        random.Random(repeat).shuffle(order)
        for position, candidate in enumerate(order):
            known = table.rows.setdefault(key_of(candidate), [])
            if len(known) > repeat or (known and known[-1].outcome is not Outcome.COMPLETED):
                continue
            plan = driver.plan_again(Purpose.RECORD, candidate)
            (result,) = driver.run(Work((plan,)))
            driver.next_ended(timeout_s=0.0)
            assert isinstance(result, TrialResult)
            if result.outcome is Outcome.CANCELLED:
                return table
            row = TableRow.of(candidate, repeat, result)
            append_line(output, row)
            known.append(row)
            tell(repeat * len(order) + position + 1, total, candidate, result)
    return table


def grid(driver: StudyDriver, space: SearchSpace, sizes: Sequence[int]) -> list[Candidate]:
    """Every lineage of a space at each micro-batch size (samples), with the user's accumulation."""
    assert driver.state.profile is not None
    profile = driver.state.profile.profile
    assert profile is not None
    replicas = Replicas(driver.setup.slots, profile.data_parallel_size, driver.known.base_config)
    accumulation = driver.known.base_config.get(ACCUMULATION, "auto")
    return [
        Candidate(
            knobs=arm.lineage(index),
            micro_batch_size=size,
            gradient_accumulation_steps=1 if accumulation == "auto" else accumulation,
            slots=driver.setup.slots,
            data_parallel_size=replicas.of(arm.knobs),
        )
        for arm in space.arms
        for index in range(arm.size)
        for size in sizes
    ]


def _head(driver: StudyDriver) -> TableHead:
    profile, experiment = driver.state.profile, driver.setup.experiment
    assert profile is not None
    assert profile.profile is not None
    return TableHead(
        name=experiment.name,
        entrypoint=[*experiment.entrypoint.arguments],
        base_config=driver.known.base_config,
        slots=experiment.config.resources.slots_per_trial,
        device=driver.setup.device,
        memory_limit=driver.setup.memory_limit,
        profile=profile.profile,
        machine={
            "processor": platform.processor() or platform.machine(),
            "slots": str(len(driver.setup.host.slots)),
            **profile.versions,
        },
    )
