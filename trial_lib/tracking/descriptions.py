"""The Markdown description of the run of a study, a trial or a full experiment. The answer comes first."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trial_lib.records.answer_line import NO_GAIN, gain_line
from trial_lib.records.full_experiment_folder import FullExperimentPaths, FullExperimentRecord
from trial_lib.records.planned_trials import PlannedTrials
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.step_account import StepAccount
from trial_lib.records.study_folder import StudyPaths, StudyRecord
from trial_lib.records.units import bytes_shown
from trial_lib.secrets.by_name import redact
from trial_lib.secrets.sent_command import sent_command

_SHOWN_OF_A_TRIAL = ("throughput", "FLOPS_per_gpu", "latency")


def study_description(record: StudyRecord, paths: StudyPaths, answer: Mapping[str, Any]) -> str:
    """Returns the description of a study's run; `answer` is the content of `best_ds_metrics.json`, empty without
    one.
    """
    metric = SEARCH_METRICS[record.metric]
    tuned = (
        f"The `{record.method}` search tuned the DeepSpeed configuration of **{record.name}** for `{metric.name}` "
        f"({metric.unit}){_program(record, paths)}."
    )
    if record.best_number is None or not answer:
        headline = record.finding or f"Status: {record.status.value}."
        return f"**{headline}** {record.reason}".rstrip() + f"\n\n{tuned}"
    lines = [
        f"**{record.finding or _of_an_older_version(record)}**",
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
    """Returns where the time of a step goes, from the content of `best_ds_metrics.json`; nothing of other versions."""
    try:
        return [StepAccount.of_document(account) for account in answer.get("why") or ()]
    except (ValueError, AttributeError, TypeError):
        return []


def _of_an_older_version(record: StudyRecord) -> str:
    """Returns the answer of a record that holds no sentence."""
    return NO_GAIN if record.gain is None else gain_line(record.gain)


def trial_description(result: TrialResult, metric: str) -> str:
    """Returns the description of a trial's run: its metrics, the study's first, or the reason of its failure."""
    if result.outcome is not Outcome.COMPLETED:
        outcome = result.outcome.value.replace("_", " ")
        return f"**{outcome}:** {result.reason}" if result.reason else f"**{outcome}**"
    peak = f"peak memory {bytes_shown(max(result.memory.peak))}" if result.memory.peak else ""
    return ", ".join(filter(None, [_measured(result.metrics, metric), peak]))


def _measured(metrics: Mapping[str, float], first: str) -> str:
    names = [name for name in dict.fromkeys((first, *_SHOWN_OF_A_TRIAL)) if name in metrics]
    return ", ".join(f"{name} {SEARCH_METRICS[name].shown(metrics[name])}" for name in names)


def training_description(record: FullExperimentRecord, paths: FullExperimentPaths) -> str:
    """Returns the description of a full experiment's run."""
    lines = [f"**Status: {record.status.value}.** {record.reason}".rstrip()]
    if record.best_checkpoint is not None:
        lines.append(f"**Best checkpoint:** `{paths.checkpoints / record.best_checkpoint}`")
    lines.append(f"The full experiment of **{record.name}**: trained at full length.")
    return "\n\n".join(lines)


def _program(record: StudyRecord, paths: StudyPaths) -> str:
    """Returns the trained program by the experiment's name for it; empty if there is none."""
    entrypoint: Any = record.arguments.get("command") or None
    if entrypoint is None and paths.experiment.exists():
        entrypoint = yaml.safe_load(paths.experiment.read_text()).get("entrypoint")
    text = entrypoint if isinstance(entrypoint, str) or entrypoint is None else shlex.join(map(str, entrypoint))
    return f": `{sent_command(text, Path(record.model_dir))}` in `{record.model_dir}`" if text else ""


def _changes(record: StudyRecord, paths: StudyPaths) -> str:
    """Returns a table of the settings that the winner changes; empty if there are none."""
    if not paths.best_ds_config.exists() or not record.ds_config:
        return ""
    own, best = flatten(redact(record.ds_config)), flatten(redact(json.loads(paths.best_ds_config.read_text())))
    changed = [name for name in dict.fromkeys([*own, *best]) if name in best and own.get(name) != best[name]]
    rows = [f"| {name} | {as_text(own[name]) if name in own else ''} | {as_text(best[name])} |" for name in changed]
    return "\n".join(["| setting | yours | winner |", "|---|---|---|", *rows]) if rows else ""


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested sections as one level of dotted names.

    Example:
        >>> flatten({"zero_optimization": {"stage": 2}})
        {'zero_optimization.stage': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def as_text(value: Any) -> str:
    """Returns a setting's value for MLflow: a text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
