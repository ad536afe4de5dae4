"""Reads a study's folder into plain data for people, whether the study runs, has ended or was killed."""

import contextlib
import fcntl
import importlib.metadata
import json
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from pydantic import ValidationError

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS
from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    resolve_batch,
    without_tuning_keys,
)
from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.launch.outcome import RankRecord, read_rank_record
from zerotune.trial_lib.messages.errors import InputError, plain
from zerotune.trial_lib.messages.secrets import redact
from zerotune.trial_lib.plan.plan_record import PlannedTrials
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import OwnCommand, StudyPaths, StudyRecord, StudyStatus, TrialPaths
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult
from zerotune.trial_lib.records.step_account import StepAccount
from zerotune.trial_lib.records.switches import AS_TYPED, PROGRAM, is_switch
from zerotune.trial_lib.records.units import NONE_FOUND, bytes_shown, gain_line
from zerotune.trial_lib.report.study_view import (
    INTERRUPTED,
    ConfirmedView,
    Interval,
    SettingChange,
    StudyView,
    TrialView,
    device_of,
    memory_views,
    row_of,
    shown_view,
)
from zerotune.trial_lib.search.knobs import get_knob, leaves
from zerotune.trial_lib.search.zero_settings import arm_label
from zerotune.trial_lib.study.finding import Confirmed, Estimate, Finding
from zerotune.trial_lib.study.folder import read_own_text, read_record
from zerotune.trial_lib.study.history import StudyState, read_history, waiting_trials
from zerotune.trial_lib.study.open_search import foreseen_in
from zerotune.trial_lib.study.program import completed_config, learned_switches


def study_facts(paths: StudyPaths, record: StudyRecord, results: Iterable[TrialResult]) -> dict[str, str]:
    """The circumstances of a study, by name. If its trials differ, a fact has several values."""
    by_number = {result.number: result for result in results}
    profile = next((result.profile for result in by_number.values() if result.profile is not None), None)
    facts = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(record.started_at)),
        "host": _values(result.host for result in by_number.values()),
        "device": device_of(by_number.values()),
        "slots of a trial": _values(
            str(len(result.memory.peak)) for result in by_number.values() if result.memory.peak
        ),
    }
    if profile is not None:
        facts |= {
            "parameters": f"{profile.num_params:,}, of which {profile.trainable_num_params:,} are trained",
            "memory for the model on a slot": bytes_shown(profile.gpu_mem) if profile.gpu_mem else "no limit",
            **({"memory of the host for each rank": bytes_shown(profile.host_mem)} if profile.host_mem else {}),
            "activations of one sample": bytes_shown(profile.activation_mem_per_gpu),
            "model replicas": str(profile.data_parallel_size),
        }
    names = dict.fromkeys(name for result in by_number.values() for name in result.versions)
    facts |= {
        name: _values(result.versions.get(name, "") for result in by_number.values() if result.versions)
        for name in names
    }
    facts["zerotune"] = importlib.metadata.version("zerotune")
    facts["model directory"] = record.model_dir
    command = record.arguments.get("command") or ()
    if command:
        facts["command"] = shlex.join(command)
    facts["search"] = _arguments(record.arguments)
    facts["folder"] = str(paths.root)
    return {name: value for name, value in facts.items() if value}


def _values(found: Iterable[str]) -> str:
    return ", ".join(value for value in dict.fromkeys(found) if value)


def _arguments(arguments: Mapping[str, Any]) -> str:
    shown = redact({name: value for name, value in arguments.items() if name not in ("command", "settings")})
    words = {**shown, **redact(arguments.get("settings") or {})}
    return " ".join(
        f"{name}={','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for name, value in words.items()
        if value not in (None, [], {}, (), "")
    )


def confirmed_views(finding: Finding, candidates: Mapping[int, Candidate]) -> tuple[ConfirmedView, ...]:
    measured = [one for one in (finding.own, *finding.candidates) if one is not None and one.trials]
    return tuple(
        ConfirmedView(
            name="your configuration" if one.verdict == "own" else one.name,
            verdict=one.verdict,
            trials=one.trials,
            micro_batch_size=candidates[one.trials[0]].micro_batch_size,
            throughput=_confirmed_throughput(one, finding.metric),
            gain=_interval(one.gain),
            is_winner=one == finding.winner,
            note=one.reason or one.losses,
        )
        for one in measured
        # The history may be missing.
        if one.trials[0] in candidates
    )


def _interval(estimate: Estimate | None) -> Interval | None:
    return None if estimate is None else Interval(estimate.value, estimate.low, estimate.high)


def _confirmed_throughput(confirmed: Confirmed, metric: str) -> Interval | None:
    value, estimate = confirmed.metrics.get("throughput"), confirmed.value
    if value is None:
        return None
    if estimate is None or not SEARCH_METRICS[metric].is_throughput or not estimate.value:
        return Interval(value, value, value)
    return Interval(value, value * estimate.low / estimate.value, value * estimate.high / estimate.value)


# Of the ends of logs: enough for a failed trial, and no more than a page can hold for all together.
_FAILED, _COMPLETED = (50, 6000), (10, 1200)  # lines, characters
_ALL_CHARACTERS = 1_000_000


class LogEnds:
    """The ends of the logs of one study, in which the values of `secrets` are hidden."""

    def __init__(self, paths: StudyPaths, secrets: KnownSecrets | None) -> None:
        self._paths = paths
        self._secrets = secrets
        self._left = _ALL_CHARACTERS

    def of(self, result: TrialResult) -> tuple[str, str]:
        """The end of a trial's log, and the path of the whole log within the study's folder.

        The log is that of the rank that failed first. If its program raised an exception, the traceback comes instead.
        """
        if not result.logs:
            return "", ""
        record = first_failed(result, self._paths)
        log = Path(record.log)
        text = record.log_tail
        if record.failure is not None and not record.failure.ended_early:
            text = record.failure.traceback or text
        # A secret at the cut would lose the part that it is known by.
        text = text if self._secrets is None else self._secrets.hide(text)
        shown = _end(text, *(_COMPLETED if result.outcome is Outcome.COMPLETED else _FAILED))
        if len(shown) > self._left:
            shown = ""
        self._left -= len(shown)
        return shown, str(log.relative_to(self._paths.root)) if log.is_relative_to(self._paths.root) else str(log)


def first_failed(result: TrialResult, paths: StudyPaths) -> RankRecord:
    """The record of the rank that failed first; of rank 0 if none failed.

    The result is of a trial that has logs, and the study's folder may have moved.
    """
    rank = result.failed_rank or 0
    written, typed = Path(result.logs[rank]), paths.trial(result.number).as_typed.root.name
    # It is another trial's if that has run the same configuration.
    folder = written.parent.parent if written.parent.name == typed else written.parent
    run = TrialPaths(paths.trials / folder.name).run_of(result.logs[rank])
    # In a folder that somebody has sent, a name or a link may lead to any file of this user's.
    logs = [log for log in (run.log(rank), written) if log.resolve().is_relative_to(paths.root.resolve())]
    log, *_ = [*filter(Path.exists, logs), *logs, paths.root]
    return read_rank_record(run.measurement(rank), run.failure(rank), log)


def _end(text: str, lines: int, characters: int) -> str:
    # A progress bar rewrites its line. The last state counts.
    last = [plain(line.rstrip("\r").rpartition("\r")[2]) for line in text.strip().split("\n")[-lines:]]
    return "\n".join(last)[-characters:]


_RESTORE = "Restore the file."
_LARGEST = 1e300  # No figure is larger.
# The measurements, the winning configuration, and the command to train with it.
_Answer = tuple[dict[str, Any], dict[str, Any] | None, str]
_NO_ANSWER: _Answer = {}, None, ""


def read_study(root: Path, secrets: KnownSecrets | None = None) -> StudyView:
    """`secrets` are hidden, with all that looks like a secret. None hides nothing, for the study's owner.

    Raises InputError if the folder has no study, or its files are damaged.
    """
    paths = StudyPaths(root.absolute())
    record = read_record(paths)
    state = StudyState(read_history(paths.history))
    shown = dict if secrets is None else redact
    base = _base_config(record, state.profile)
    # The answer, if there is one.
    measured, config, command = _answer(paths) if record.status is StudyStatus.COMPLETED else _NO_ANSWER
    best_config = None if config is None else shown(config)
    best = None if best_config is None else shown(_with_switches(best_config, record, state))
    finding = _finding(measured)
    # The trials, and the whole.
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
        metric=record.metric,
        headline=_headline(record, status, trials),
        notes=() if finding is None else tuple(finding.lines),
        gain=None if config is None else record.gain,
        gain_interval=None if config is None else record.gain_interval,
        best_number=record.best_number,
        before=_figures(measured, "submitted"),
        after=_figures(measured, "metrics"),
        best_config=best_config,
        best_command=command,
        diff=own.diff if command and (own := OwnCommand.of(paths)) is not None else "",
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
        worths=() if finding is None else finding.worths,
        num_params=0 if state.profile is None or state.profile.profile is None else state.profile.profile.num_params,
        keeps_batch=len(_global_batches(state)) < 2,
        why=_why(measured),
    )
    view = replace(view, waiting=waiting_trials(paths, view.running))
    return shown_view(view, secrets)


def _global_batches(state: StudyState) -> set[int]:
    tried = (state.candidates[number] for number in state.results if state.purposes[number] is not Purpose.PROFILE)
    return {each.micro_batch_size * each.gradient_accumulation_steps * (each.data_parallel_size or 1) for each in tried}


def _max_trials(record: StudyRecord, paths: StudyPaths) -> int:
    max_trials = record.arguments.get("max_trials", 0)
    if not isinstance(max_trials, int):
        said = "the study's record is damaged or of another version (max_trials is no number)."
        raise InputError(said, where=str(paths.record), remedy=_RESTORE)
    return max_trials


def _is_interrupted(record: StudyRecord, paths: StudyPaths) -> bool:
    # Whether a study with status `running` has no driver, because its lock is free.
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
    base = without_tuning_keys(record.ds_config)
    program = None if profile is None else profile.program
    complete = base if program is None else completed_config(base, program)
    if not record.switches:
        return complete
    layouts = {LAYOUTS: record.layouts} if record.layouts else {}
    switches = record.switches if program is None else learned_switches(record.switches, program)
    return {**complete, PROGRAM: switches, **layouts}


def _answer(paths: StudyPaths) -> _Answer:
    """Nothing if one of the answer's files is missing. Raises InputError if a file is damaged."""
    try:
        command = read_own_text(paths.best_command, "the study's answer", _RESTORE).rstrip()
        return _document(paths.best_ds_metrics), _document(paths.best_ds_config), command
    except FileNotFoundError:
        return _NO_ANSWER


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
    # The finding of the confirming trials, from the study's answer; None without one.
    document = measured.get("confirmation")
    if not isinstance(document, dict):
        return None
    try:
        return Finding.model_validate({name: value for name, value in document.items() if name in Finding.model_fields})
    except ValidationError:
        return None


def _why(measured: Mapping[str, Any]) -> tuple[StepAccount, ...]:
    # Where the time goes, from the study's answer; nothing if it is of another version.
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
    candidate = state.candidates.get(record.best_number or 0)
    if not record.switches or candidate is None:
        return best_config
    return {**best_config, PROGRAM: {**record.switches, **candidate.switches}}


def _changes(
    base: Mapping[str, Any], best: Mapping[str, Any], profile: TrialResult | None
) -> tuple[SettingChange, ...]:
    # The changes. A batch key is none if DeepSpeed derives the same from the user's other two.
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
    value = result.metrics.get("throughput")
    if value is None or result.outcome is not Outcome.COMPLETED:
        return None
    if len(result.step_times) < 2:
        return Interval(value, value, value)
    # The range of the middle half of its steps.
    quick, middle, slow = quantiles(result.step_times, n=4, method="inclusive")
    return Interval(value, value * middle / slow, value * middle / quick)
