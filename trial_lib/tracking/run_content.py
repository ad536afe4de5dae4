"""The content of MLflow's runs of studies, trials, full experiments and plans, from their records, without MLflow."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import yaml

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, TRAIN_BATCH
from zerotune.trial_lib.inputs.known_secrets import sent_command, sent_document
from zerotune.trial_lib.messages.secrets import redact
from zerotune.trial_lib.plan.answer import fewest_sentence
from zerotune.trial_lib.plan.plan_record import (
    PlannedArm,
    PlannedDevices,
    PlannedRange,
    PlannedTrials,
    PlanPaths,
    PlanRecord,
)
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.folders import (
    FullExperimentPaths,
    FullExperimentRecord,
    RunRecord,
    StudyPaths,
    StudyRecord,
    StudyStatus,
    TrialPaths,
)
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialDevice, TrialResult
from zerotune.trial_lib.records.step_account import StepAccount
from zerotune.trial_lib.records.switches import AS_TYPED, PROGRAM, path_of, switches_of
from zerotune.trial_lib.records.units import NO_GAIN, bytes_shown, gain_line
from zerotune.trial_lib.search.catalogue import KNOBS
from zerotune.trial_lib.search.knobs import get_knob

# The Markdown description of the run of a study, a trial or a full experiment. The answer comes first.


_SHOWN_OF_A_TRIAL = ("throughput", "FLOPS_per_gpu", "latency")


def study_description(record: StudyRecord, paths: StudyPaths, answer: Mapping[str, Any]) -> str:
    """`answer` is the content of `best_ds_metrics.json`, empty without one."""
    metric = SEARCH_METRICS[record.metric]
    tuned = (
        f"The `{record.method}` search tuned the DeepSpeed configuration of **{record.name}** for `{metric.name}` "
        f"({metric.unit}){_program(record, paths)}."
    )
    if record.best_number is None or not answer:
        headline = record.finding or f"Status: {record.status.value}."
        return f"**{headline}** {record.reason}".rstrip() + f"\n\n{tuned}"
    lines = [
        # An older version has written no finding.
        f"**{record.finding or (NO_GAIN if record.gain is None else gain_line(record.gain))}**",
        f"Trial {record.best_number:04d}: {_measured(answer['metrics'], record.metric)}.",
    ]
    if record.reason:
        lines.append(record.reason)
    if record.regression:
        lines.append(f"**Slower than before:** {record.regression}")
    planned = PlannedTrials.in_file(paths.planned_trials)
    if planned is not None:
        lines.append(planned.sentence)
    notes = (answer.get("confirmation") or {}).get("notes", ())
    lines.append("\n".join(f"- {note}" for note in notes))
    why = [f"- {account.sentences}" for account in step_accounts_of(answer)]
    lines.append("**Where the time goes:**\n\n" + "\n".join(why) if why else "")
    lines.append(_changes(record, paths))
    command = sent_command(paths.best_command.read_text(), Path(record.model_dir))
    lines.append(f"**To train with it** (`sh {paths.best_command}`):\n\n```sh\n{command}\n```")
    lines.append(tuned)
    if paths.report.exists():
        lines.append("Every figure and every trial: `report.html`, among the artifacts.")
    return "\n\n".join(filter(None, lines))


def step_accounts_of(answer: Mapping[str, Any]) -> list[StepAccount]:
    """Where the time of a step goes, from the content of `best_ds_metrics.json`; nothing of other versions."""
    try:
        return [StepAccount.of_document(account) for account in answer.get("why") or ()]
    except (ValueError, AttributeError, TypeError):
        return []


def trial_description(result: TrialResult, metric: str) -> str:
    """A trial's metrics, the study's first, or the reason of its failure."""
    if result.outcome is not Outcome.COMPLETED:
        outcome = result.outcome.value.replace("_", " ")
        return f"**{outcome}:** {result.reason}" if result.reason else f"**{outcome}**"
    peak = f"peak memory {bytes_shown(max(result.memory.peak))}" if result.memory.peak else ""
    return ", ".join(filter(None, [_measured(result.metrics, metric), peak]))


def _measured(metrics: Mapping[str, float], first: str) -> str:
    names = [name for name in dict.fromkeys((first, *_SHOWN_OF_A_TRIAL)) if name in metrics]
    return ", ".join(f"{name} {SEARCH_METRICS[name].shown(metrics[name])}" for name in names)


def _program(record: StudyRecord, paths: StudyPaths) -> str:
    # The trained program by the experiment's name for it; empty if there is none.
    entrypoint: Any = record.arguments.get("command") or None
    if entrypoint is None and paths.experiment.exists():
        entrypoint = yaml.safe_load(paths.experiment.read_text()).get("entrypoint")
    text = entrypoint if isinstance(entrypoint, str) or entrypoint is None else shlex.join(map(str, entrypoint))
    return f": `{sent_command(text, Path(record.model_dir))}` in `{record.model_dir}`" if text else ""


def _changes(record: StudyRecord, paths: StudyPaths) -> str:
    # A table of the settings that the winner changes; empty if there are none.
    if not paths.best_ds_config.exists() or not record.ds_config:
        return ""
    own, best = flatten(redact(record.ds_config)), flatten(redact(json.loads(paths.best_ds_config.read_text())))
    changed = [name for name in dict.fromkeys([*own, *best]) if name in best and own.get(name) != best[name]]
    rows = [f"| {name} | {as_text(own[name]) if name in own else ''} | {as_text(best[name])} |" for name in changed]
    return "\n".join(["| setting | yours | winner |", "|---|---|---|", *rows]) if rows else ""


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one level of dotted names, such as `zero_optimization.stage`."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def as_text(value: Any) -> str:
    """A setting's value for MLflow: a text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


STUDY_ID = "study_id"
RECORD_ID = "record_id"  # the tag that identifies a run: the id of a study, a trial or a full experiment
KIND = "kind"  # the tag that only full experiments have
PURPOSE = "purpose"  # the tag that only trials have
STAGE_PARAM = "zero_stage"
MICRO_BATCH_PARAM = "micro_batch_size"
ACCUMULATION_PARAM = ACCUMULATION
FULL_EXPERIMENT = "full_experiment"
WINNER = "winner"  # the tag of the trial that is the answer
ORDER = "order"  # the metric that the table of trials is sorted by
_PARENT = "mlflow.parentRunId"
IDS = (STUDY_ID, RECORD_ID, _PARENT)  # the tags by which runs are found
DESCRIPTION = "mlflow.note.content"
PARAM_CHARACTERS = 6000
TAG_CHARACTERS = 5000
_NAME_CHARACTERS = 250
_STATUS = {
    StudyStatus.RUNNING: "RUNNING",
    StudyStatus.COMPLETED: "FINISHED",
    StudyStatus.FAILED: "FAILED",
    StudyStatus.CANCELLED: "KILLED",
}
_STATUS_OF_OUTCOME = {Outcome.COMPLETED: "FINISHED", Outcome.CANCELLED: "KILLED", Outcome.TOO_SLOW: "KILLED"}


@dataclass(frozen=True)
class MetricValue:
    name: str
    value: float
    step: int = 0


@dataclass(frozen=True)
class RunContent:
    record_id: str  # unique over all studies
    name: str  # for people
    status: str  # in MLflow's words
    started_at: float  # seconds since the epoch
    ended_at: float | None  # seconds since the epoch. None while it runs.
    tags: dict[str, str]  # by name
    params: dict[str, str]  # by name
    metrics: list[MetricValue] = field(default_factory=list)  # in the order of their steps
    artifacts: list[Path] = field(default_factory=list)  # files, sent under their own names


def study_content(record: StudyRecord, paths: StudyPaths) -> RunContent:
    answer = json.loads(paths.best_ds_metrics.read_text()) if paths.best_ds_metrics.exists() else {}
    metrics = {
        **_profile_metrics(paths),
        **_with_units(answer.get("metrics", {})),
        **({} if record.gain is None else {"gain": record.gain}),
        **dict(zip(("gain_low", "gain_high"), record.gain_interval or (), strict=False)),
        **_plan_metrics(PlannedTrials.in_file(paths.planned_trials)),
        **_step_metrics(step_accounts_of(answer)),
        **order_of(record.metric, answer.get("metrics", {}).get(record.metric), "study"),
    }
    tags = {
        "reason": record.reason,
        "best_trial": "" if record.best_number is None else f"{record.best_number:04d}",
        "finding": record.finding,
        "why": " ".join(account.sentences for account in step_accounts_of(answer)[:2]),
        # Only set if there is one, so that a search for the tag finds only those studies.
        **({"regression": record.regression} if record.regression else {}),
        DESCRIPTION: study_description(record, paths, answer),
    }
    arguments = sent_document(record.arguments, Path(record.model_dir))
    params = {"method": record.method, "metric": record.metric, "model_dir": record.model_dir, **arguments}
    return RunContent(
        record_id=record.study_id,
        name=record.study_id,
        status=_STATUS[record.status],
        started_at=record.started_at,
        ended_at=record.ended_at,
        tags=as_tags({STUDY_ID: record.study_id, RECORD_ID: record.study_id, **_source(record), **tags}),
        params=as_params(params),
        metrics=as_points(metrics),
        artifacts=[file for file in study_artifacts(paths) if file.exists()],
    )


def order_of(
    metric: str, value: float | None, place: Literal["trial", "study", "answer"] = "trial"
) -> dict[str, float]:
    """A trial's place in the table, as a metric: the larger the better. The answer is above all, and its study next."""
    if value is None:
        return {}
    if place != "trial":
        return {ORDER: (1e6 if place == "answer" else 1e3) * (abs(value) + 1.0)}
    return {ORDER: -value if SEARCH_METRICS[metric].smaller_is_better else value}


def _with_units(metrics: Mapping[str, float]) -> dict[str, float]:
    # MLflow's columns are bare numbers, so those that people read first stand there once more, in a unit of the name.
    known = (metric for metric in SEARCH_METRICS.values() if metric.with_unit and metric.name in metrics)
    shown = {metric.with_unit: float(f"{metrics[metric.name] / metric.of_unit:.5g}") for metric in known}
    return {**metrics, **shown}


def _source(record: RunRecord) -> dict[str, str]:
    # Tags by which MLflow shows who trained what. A record of an older version has neither.
    found = {
        "mlflow.source.name": record.model_dir,
        "mlflow.source.git.commit": record.git_commit,
        "mlflow.user": record.user,
    }
    return {"mlflow.source.type": "LOCAL", **{name: value for name, value in found.items() if value}}


def _plan_metrics(planned: PlannedTrials | None) -> dict[str, float]:
    if planned is None:
        return {}
    errors, speed = planned.memory_errors, planned.speed_error
    memory = {"plan.memory_error": median(errors), "plan.memory_error_worst": max(errors)} if errors else {}
    return {**memory, **({} if speed is None else {"plan.speed_error": speed})}


def _step_metrics(accounts: Sequence[StepAccount]) -> dict[str, float]:
    # The winner's shares of a step as `time.compute` and so on, and the user's as `submitted.time.compute`.
    found: dict[str, float] = {}
    for account in accounts:
        if account.basis == "traced" and account.role in ("winner", "own"):
            is_answer = account is accounts[0]
            prefix = "" if is_answer else "submitted."
            found |= {f"{prefix}time.{part}": share for part, share in account.shares.items()}
    return found


def _foreseen_metrics(paths: TrialPaths, number: int) -> dict[str, float]:
    # What the study's plan foresaw for a trial; nothing without a plan.
    planned = PlannedTrials.in_file(StudyPaths(paths.root.parents[1]).planned_trials)
    trial = next((each for each in (() if planned is None else planned.trials) if each.number == number), None)
    if trial is None:
        return {}
    speed = {} if trial.samples_per_s is None else {"foreseen.throughput": trial.samples_per_s}
    return {"foreseen.memory": trial.memory, **speed}


def _profile_metrics(paths: StudyPaths) -> dict[str, float]:
    # The findings of the profile trial (bytes and counts), and the needs of each arm.
    if not paths.profile.exists():
        return {}
    report = json.loads(paths.profile.read_text())
    needs = {
        f"profile.{row['label']}.{name}": float(row[name])
        for row in report.get("rows", ())
        for name in ("states", "largest_micro_batch")
    }
    # Unknown values and lists are no metrics.
    found = {name: value for name, value in report["profile"].items() if isinstance(value, (int, float))}
    return {**{f"profile.{name}": float(value) for name, value in found.items()}, **needs}


def study_artifacts(paths: StudyPaths) -> list[Path]:
    """The files of a study that go to MLflow as soon as they exist. The user's texts and logs stay here."""
    answer = [paths.best_ds_config, paths.best_ds_metrics]
    return [paths.profile, *answer, paths.report, *sorted(paths.figures.glob("*.html"))]


def trial_content(record: StudyRecord, paths: TrialPaths, parent_run_id: str) -> RunContent:
    result = TrialResult.from_text(paths.result.read_text())
    candidate = Candidate.model_validate_json(paths.candidate.read_text())
    tags = {
        _PARENT: parent_run_id,
        STUDY_ID: record.study_id,
        RECORD_ID: result.trial_id,
        "trial": f"{result.number:04d}",
        PURPOSE: result.purpose.value,
        "outcome": result.outcome.value,
        "measured": "swept" if result.swept else "fresh",
        "reason": result.reason,
        "host": result.host,
        "config_hash": result.config_hash,
        DESCRIPTION: trial_description(result, record.metric),
        **_device_tags(result.devices),
        **{f"version.{name}": version for name, version in result.versions.items()},
    }
    shares = {} if result.traced is None else {f"time.{part}": share for part, share in result.traced.shares.items()}
    foreseen = _foreseen_metrics(paths, result.number)
    order = order_of(record.metric, result.metrics.get(record.metric))
    steps = [MetricValue("step_time", seconds, step) for step, seconds in enumerate(result.step_times)]
    return RunContent(
        record_id=result.trial_id,
        name=f"{result.number:04d} {result.purpose.label(result.name or candidate.label)}",
        status=_STATUS_OF_OUTCOME.get(result.outcome, "FAILED"),
        started_at=result.started_at,
        ended_at=result.started_at + sum(result.phases.values()),
        tags=as_tags(tags),
        params=as_params(_knobs(candidate, {**record.ds_config, PROGRAM: record.switches})),
        metrics=[*as_points({**_trial_metrics(result), **foreseen, **shares, **order}), *steps],
        artifacts=[file for file in (paths.ds_config, paths.result) if file.exists()],
    )


def _device_tags(devices: Sequence[TrialDevice]) -> dict[str, str]:
    # A trial's devices, and the causes that slowed them down; nothing if unknown.
    found = {
        "devices": [device.device for device in devices],
        "held_down": [reason for device in devices for reason in device.held_down],
        "company": [f"{each.name or 'a process'} ({each.pid})" for device in devices for each in device.company],
    }
    return {name: ", ".join(dict.fromkeys(values)) for name, values in found.items() if values}


def _knobs(candidate: Candidate, base: Mapping[str, Any]) -> dict[str, Any]:
    # A candidate's settings, flat. Every trial has the common ones, so that charts can use them as an axis.
    complete = candidate.complete(base)
    knobs = {
        **{path: value for path in KNOBS if (value := get_knob(complete, path)) is not None},
        **flatten(candidate.knobs),
        **{path_of(place): AS_TYPED if value is None else value for place, value in switches_of(complete).items()},
        MICRO_BATCH_PARAM: candidate.micro_batch_size,
        ACCUMULATION_PARAM: candidate.gradient_accumulation_steps,
        "slots": candidate.slots,
        STAGE_PARAM: complete.get("zero_optimization", {}).get("stage", 0),
    }
    if TRAIN_BATCH in candidate.overrides:
        knobs[TRAIN_BATCH] = candidate.overrides[TRAIN_BATCH]
    return knobs


def _trial_metrics(result: TrialResult) -> dict[str, float]:
    # Memory is in bytes of the rank with the most, phases are in seconds. Of its devices the slowest clock (MHz), the
    # highest temperature and the lowest power limit (W) count.
    memory = {
        "peak_memory": result.memory.peak,
        "memory_after_initialize": result.memory.after_initialize,
        "peak_memory_reserved": result.memory.peak_reserved,
        "allocator_retries": result.memory.allocator_retries,
        "allocator_retries_counted": result.memory.counted_retries,
    }
    return {
        **_with_units(result.metrics),
        **{name: float(max(ranks)) for name, ranks in memory.items() if ranks},
        **_device_metrics(result.devices),
        **{f"phase.{name}": seconds for name, seconds in result.phases.items()},
    }


def _device_metrics(devices: Sequence[TrialDevice]) -> dict[str, float]:
    found = {
        "device_clock": min((device.clock for device in devices if device.clock is not None), default=None),
        "device_temperature": max((each.temperature for each in devices if each.temperature is not None), default=None),
        "device_power_limit": min((each.power_limit for each in devices if each.power_limit is not None), default=None),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def full_experiment_content(
    record: FullExperimentRecord, paths: FullExperimentPaths, parent_run_id: str | None
) -> RunContent:
    """The run of a full experiment without its metrics, which are sent as they come."""
    best = {} if record.best_metric is None else {"best_metric": f"{record.best_metric:.6g}"}
    description = [f"**Status: {record.status.value}.** {record.reason}".rstrip()]
    if record.best_checkpoint is not None:
        description.append(f"**Best checkpoint:** `{paths.checkpoints / record.best_checkpoint}`")
    description.append(f"The full experiment of **{record.name}**: trained at full length.")
    tags = {
        **({} if parent_run_id is None else {_PARENT: parent_run_id}),
        **({} if record.study_id is None else {STUDY_ID: record.study_id}),
        RECORD_ID: record.experiment_id,
        KIND: FULL_EXPERIMENT,
        "reason": record.reason,
        "attempts": str(record.attempts),
        "batches": "" if record.batches is None else str(record.batches),
        "best_checkpoint": record.best_checkpoint or "",
        **best,
        **_source(record),
        DESCRIPTION: "\n\n".join(description),
    }
    params = {
        **record.ds_config,
        STAGE_PARAM: (record.ds_config.get("zero_optimization") or {}).get("stage", 0),
        "model_dir": record.model_dir,
        "hyperparameters": record.hparams,
    }
    return RunContent(
        record_id=record.experiment_id,
        name=record.experiment_id,
        status=_STATUS[record.status],
        started_at=record.started_at,
        ended_at=record.ended_at,
        tags=as_tags(tags),
        params=as_params(params),
        artifacts=[file for file in [paths.ds_config] if file.exists()],
    )


PLAN = "plan"  # the kind of a plan's run


def plan_artifacts(paths: PlanPaths) -> list[Path]:
    """The files of a plan that go to MLflow."""
    return [paths.record, paths.best_ds_config, paths.report]


def plan_content(record: PlanRecord, paths: PlanPaths) -> RunContent:
    """The run of a plan. The names of its metrics begin with `foreseen`, because nothing was measured."""
    chosen = record.chosen
    stage = 0 if chosen is None else chosen.ds_config.get("zero_optimization", {}).get("stage", 0)
    best = {} if record.best is None else {"best_devices": record.devices[record.best].label}
    tags = {
        RECORD_ID: record.plan_id,
        KIND: PLAN,
        "finding": record.answer,
        "reason": record.stopped,
        **best,
        **{f"version.{name}": version for name, version in record.versions.items()},
        DESCRIPTION: _plan_description(record),
    }
    params = {
        "model_dir": record.model_dir,
        "on": [devices.label for devices in record.devices],
        "train_batch_size": record.train_batch_size,
        **({} if chosen is None else {"best": chosen.label, STAGE_PARAM: stage, **chosen.knobs}),
    }
    metrics = {
        "parameters": float(record.parameters),
        "plan.seconds": record.seconds,
        "plan.peak_memory": float(record.peak_bytes),
        **({} if chosen is None else dict(_plan_figures("foreseen.best", chosen))),
    }
    for devices in record.devices:
        for arm in devices.arms:
            metrics |= dict(_plan_figures(f"foreseen.{devices.label.replace(':', ' ')}.{arm.label}", arm))
    return RunContent(
        record_id=record.plan_id,
        name=record.plan_id,
        status="FAILED" if record.stopped else "FINISHED",
        started_at=record.started_at,
        ended_at=record.started_at + record.seconds,
        tags=as_tags(tags),
        params=as_params(params),
        metrics=as_points(metrics),
        artifacts=[file for file in plan_artifacts(paths) if file.exists()],
    )


def _plan_figures(prefix: str, arm: PlannedArm) -> Iterator[tuple[str, float]]:
    # An arm's figures: shares, samples, bytes, samples and tokens a second.
    yield f"{prefix}.fits", arm.fits
    yield f"{prefix}.largest_micro_batch", float(arm.largest_micro_batch)
    ranges: dict[str, PlannedRange | None] = {
        "samples_per_s": arm.samples_per_s,
        "tokens_per_s": arm.tokens_per_s,
        "mfu": arm.mfu,
        "cost_per_billion_tokens": arm.cost,
        "peak_memory": arm.peak,
    }
    for name, figure in ranges.items():
        if figure is not None:
            yield f"{prefix}.{name}", figure.value


def _plan_description(record: PlanRecord) -> str:
    lines = [f"**{record.answer or record.stopped}**"]
    lines += [_of_devices(devices) for devices in record.devices]
    if record.best_command:
        command = sent_command(record.best_command, Path(record.model_dir))
        lines.append(f"**To start there** (`best_ds_config.json`):\n\n```sh\n{command}\n```")
    lines.append(f"A plan for **{record.name}**. All figures are foreseen; no device has measured them.")
    return "\n\n".join(lines)


def _of_devices(devices: PlannedDevices) -> str:
    sentences = [devices.answer, *devices.why, fewest_sentence(devices)]
    return "\n".join(
        [f"**{devices.label}**", "", *(f"- {sentence}" for sentence in dict.fromkeys(sentences) if sentence)]
    )


def as_params(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings as params: flat, as text, without values that look like secrets."""
    shown = flatten(redact(values))
    return {legal_name(key): cut(as_text(value), PARAM_CHARACTERS) for key, value in shown.items()}


def as_tags(values: Mapping[str, str]) -> dict[str, str]:
    """Tags with names and lengths that MLflow accepts."""
    return {legal_name(key): cut(value, TAG_CHARACTERS) for key, value in values.items()}


def as_points(values: Mapping[str, float]) -> list[MetricValue]:
    """Metrics without those that are infinite."""
    # MLflow turns an infinite value into the largest float, which then wins every comparison.
    return [MetricValue(legal_name(name), value) for name, value in values.items() if math.isfinite(value)]


def legal_name(name: str) -> str:
    """The name in MLflow's alphabet."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)[:_NAME_CHARACTERS]


def cut(text: str, characters: int) -> str:
    """A text, or its beginning if it is too long."""
    return text if len(text) <= characters else text[: characters - 1] + "…"
