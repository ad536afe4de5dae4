"""Reads a study's folder into plain data for people, whether the study runs, has ended or was killed."""

import contextlib
import fcntl
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trial_lib.command.switches import AS_TYPED, PROGRAM, is_switch
from trial_lib.deepspeed_config.batch import resolve_batch
from trial_lib.deepspeed_config.layout import LAYOUTS
from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, without_tuning_keys
from trial_lib.memory.zero_settings import arm_label
from trial_lib.records.answer_line import NONE_FOUND, gain_line
from trial_lib.records.planned_trials import PlannedTrials
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.step_account import StepAccount
from trial_lib.records.study_folder import StudyPaths, StudyRecord, StudyStatus
from trial_lib.report.confirmed_view import confirmed_views
from trial_lib.report.leaderboard import row_of
from trial_lib.report.log_ends import LogEnds
from trial_lib.report.memory_views import memory_views
from trial_lib.report.shown_view import shown_view
from trial_lib.report.study_facts import study_facts
from trial_lib.report.study_view import INTERRUPTED, Interval, SettingChange, StudyView, TrialView
from trial_lib.secrets.by_name import redact
from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.space.knobs import get_knob, leaves
from trial_lib.study.confirm.finding import Finding
from trial_lib.study.foresight.kept_arms import foreseen_in
from trial_lib.study.kept.history import read_history
from trial_lib.study.kept.record_file import read_own_text, read_record
from trial_lib.study.kept.waiting import waiting_trials
from trial_lib.study.known_program import completed_config, learned_switches
from trial_lib.study.state import StudyState
from trial_lib.wire.errors import InputError

_RESTORE = "Restore the file."
_LARGEST = 1e300  # No figure is larger.


@dataclass(frozen=True)
class _Answer:
    """A study's answer: the measurements, the winning configuration, and the command to train with it."""

    measured: dict[str, Any]
    config: dict[str, Any]
    command: str


def read_study(root: Path, secrets: KnownSecrets | None = None) -> StudyView:
    """Returns the view of a study.

    Args:
        root: its folder.
        secrets: values to hide, with all that looks like a secret. None hides nothing, for the study's owner.

    Raises:
        InputError: the folder has no study, or its files are damaged.
    """
    paths = StudyPaths(root.absolute())
    record = read_record(paths)
    state = StudyState(read_history(paths.history))
    shown = dict if secrets is None else redact
    base = _base_config(record, state.profile)
    answer = _answer(paths) if record.status is StudyStatus.COMPLETED else None
    measured = {} if answer is None else answer.measured
    best_config = None if answer is None else shown(answer.config)
    best = None if best_config is None else shown(_with_switches(best_config, record, state))
    finding = _finding(measured)
    metric = SEARCH_METRICS[record.metric]
    trials = _trials(paths, record, state, base, secrets)
    status = INTERRUPTED if _is_interrupted(record, paths) else record.status.value
    view = StudyView(
        study_id=record.study_id,
        name=record.name,
        folder=str(paths.root),
        status=status,
        reason=record.reason,
        regression=record.regression,
        method=record.method,
        metric=metric.name,
        unit=metric.unit,
        smaller_is_better=metric.smaller_is_better,
        headline=_headline(record, status, trials),
        notes=() if finding is None else tuple(finding.lines),
        gain=None if answer is None else record.gain,
        gain_interval=None if answer is None else record.gain_interval,
        best_number=record.best_number,
        before=_figures(measured, "submitted"),
        after=_figures(measured, "metrics"),
        best_config=best_config,
        best_command="" if answer is None else answer.command,
        changes=() if best is None else _changes(shown(base), best, state.profile),
        trials=trials,
        # A study that was ended asks for its last trials again when it is resumed.
        running={number: state.label(number) for number in state.running} if status == StudyStatus.RUNNING else {},
        withdrawn=len(state.withdrawn),
        stopped=state.stopped or "",
        max_trials=_max_trials(record, paths),
        searched=state.searched,
        failed=sum(not trial.completed for trial in trials),
        # The clock may have been set back.
        seconds=max(0.0, (record.ended_at or time.time()) - record.started_at),
        started_at=record.started_at,
        confirmed=() if finding is None else confirmed_views(finding, state.candidates),
        facts=study_facts(paths, record, state.results.values()),
        planned=PlannedTrials.in_file(paths.planned_trials),
        why=_why(measured),
    )
    view = replace(view, waiting=waiting_trials(paths, view.running))
    return shown_view(view, secrets)


def _max_trials(record: StudyRecord, paths: StudyPaths) -> int:
    max_trials = record.arguments.get("max_trials", 0)
    if not isinstance(max_trials, int):
        said = "the study's record is damaged or of another version (max_trials is no number)."
        raise InputError(said, where=str(paths.record), remedy=_RESTORE)
    return max_trials


def _is_interrupted(record: StudyRecord, paths: StudyPaths) -> bool:
    """Returns whether a study with status `running` has no driver, because its lock is free."""
    if record.status is not StudyStatus.RUNNING:
        return False
    try:
        with paths.lock.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _base_config(record: StudyRecord, profile: TrialResult | None) -> dict[str, Any]:
    """Returns the user's DeepSpeed configuration, completed by the profile trial's findings in their code."""
    base = without_tuning_keys(record.ds_config)
    program = None if profile is None else profile.program
    complete = base if program is None else completed_config(base, program)
    if not record.switches:
        return complete
    layouts = {LAYOUTS: record.layouts} if record.layouts else {}
    switches = record.switches if program is None else learned_switches(record.switches, program)
    return {**complete, PROGRAM: switches, **layouts}


def _answer(paths: StudyPaths) -> _Answer | None:
    """Returns a study's answer; None if one of its files is missing.

    Raises:
        InputError: a file is damaged.
    """
    try:
        command = read_own_text(paths.best_command, "the study's answer", _RESTORE).rstrip()
        return _Answer(_document(paths.best_ds_metrics), _document(paths.best_ds_config), command)
    except FileNotFoundError:
        return None


def _document(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_own_text(file, "the study's answer", _RESTORE))
    except (ValueError, RecursionError) as error:
        raise InputError(f"the study's answer is damaged ({error}).", where=str(file), remedy=_RESTORE) from None
    if not isinstance(document, dict):
        raise InputError("the study's answer is damaged: this is no JSON object.", where=str(file), remedy=_RESTORE)
    return document


def _figures(measured: Mapping[str, Any], name: str) -> dict[str, Any]:
    figures = measured.get(name)
    kept = figures.items() if isinstance(figures, dict) else ()
    return {metric: value for metric, value in kept if isinstance(value, int | float) and abs(value) < _LARGEST}


def _finding(measured: Mapping[str, Any]) -> Finding | None:
    """Returns the finding of the confirming trials, from the study's answer; None without one."""
    document = measured.get("confirmation")
    if not isinstance(document, dict):
        return None
    try:
        return Finding.model_validate({name: value for name, value in document.items() if name in Finding.model_fields})
    except ValidationError:
        return None


def _why(measured: Mapping[str, Any]) -> tuple[StepAccount, ...]:
    """Returns where the time goes, from the study's answer; nothing if it is of another version."""
    try:
        return tuple(StepAccount.of_document(each) for each in measured.get("why") or ())
    except (ValidationError, AttributeError, TypeError):
        return ()


def _headline(record: StudyRecord, status: str, trials: tuple[TrialView, ...]) -> str:
    if record.status is StudyStatus.COMPLETED:
        if record.finding:
            return record.finding
        best = next((trial.row for trial in trials if trial.number == record.best_number), None)
        said = (
            ""
            if best is None or best.value is None
            else (f"{best.label}: {best.metric} {SEARCH_METRICS[best.metric].shown(best.value)}")
        )
        # Records of earlier versions have a gain and no sentence.
        gain = "" if record.gain is None else gain_line(record.gain)
        return ". ".join(filter(None, (gain, said))) or "The study has completed. Its history is empty or missing."
    if record.status is StudyStatus.FAILED:
        return record.finding or NONE_FOUND
    ended = len(trials)
    state = {StudyStatus.RUNNING.value: "Still running", INTERRUPTED: "Interrupted"}.get(status, "Cancelled")
    return f"{state}: {ended} trial{'' if ended == 1 else 's'} ended so far."


def _with_switches(best_config: dict[str, Any], record: StudyRecord, state: StudyState) -> dict[str, Any]:
    """Returns the winning configuration with the winner's switches of the program."""
    candidate = state.candidates.get(record.best_number or 0)
    if not record.switches or candidate is None:
        return best_config
    return {**best_config, PROGRAM: {**record.switches, **candidate.switches}}


def _changes(
    base: Mapping[str, Any], best: Mapping[str, Any], profile: TrialResult | None
) -> tuple[SettingChange, ...]:
    """Returns the changes. A batch key is none if DeepSpeed derives the same from the user's other two."""
    own = {key: value for key, value in base.items() if key != LAYOUTS}
    if profile is not None and profile.profile is not None:
        with contextlib.suppress(InputError):
            sizes = resolve_batch(base, profile.profile.data_parallel_size)
            derived = {
                TRAIN_BATCH: sizes.train_batch_size,
                MICRO_BATCH: sizes.micro_batch_size,
                ACCUMULATION: sizes.gradient_accumulation_steps,
            }
            own = {**{key: size for key, size in derived.items() if key in best}, **own}
    return tuple(setting_changes(own, best))


def setting_changes(base: Mapping[str, Any], best: Mapping[str, Any]) -> list[SettingChange]:
    """Returns the settings that differ between two DeepSpeed configurations."""
    own, winner = dict(leaves(base)), dict(leaves(best))
    paths = dict.fromkeys([*own, *winner])
    return [SettingChange(path, own.get(path), winner.get(path)) for path in paths if own.get(path) != winner.get(path)]


def _trials(
    paths: StudyPaths, record: StudyRecord, state: StudyState, base: Mapping[str, Any], secrets: KnownSecrets | None
) -> tuple[TrialView, ...]:
    varied = sorted({path for candidate in state.candidates.values() for path, _ in leaves(candidate.knobs)})
    memory = memory_views(base, state.candidates, state.results, foreseen_in(paths.foreseen))
    logs = LogEnds(paths, secrets)
    views = []
    for number, result in sorted(state.results.items()):
        config = state.candidates[number].complete(base)
        started = max(0.0, result.started_at - record.started_at)
        log, log_path = logs.of(result)
        row = row_of(result, state.candidates[number], state.names[number], record.metric)
        views.append(
            TrialView(
                row=row if secrets is None else row.model_copy(update={"knobs": redact(row.knobs)}),
                arm=arm_label(config),
                settings={path: value for path in varied if (value := _setting(config, path)) is not None},
                started=started,
                ended=started + sum(result.phases.values()),
                throughput=_throughput(result),
                memory=memory.get(number),
                note=result.note,
                log=log,
                log_path=log_path,
            )
        )
    return tuple(views)


def _setting(config: Mapping[str, Any], path: str) -> Any:
    value = get_knob(config, path)
    return AS_TYPED if value is None and is_switch(path) else value


def _throughput(result: TrialResult) -> Interval | None:
    """Returns a trial's throughput, with the range of the middle half of its steps."""
    value = result.metrics.get("throughput")
    if value is None or result.outcome is not Outcome.COMPLETED:
        return None
    times = sorted(result.step_times)
    if len(times) < 2:
        return Interval(value, value, value)
    middle, quarter = _quantile(times, 0.5), 0.25
    return Interval(value, value * middle / _quantile(times, 1 - quarter), value * middle / _quantile(times, quarter))


def _quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
