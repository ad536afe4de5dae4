"""The answer of a study: which configuration to use, and how."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trial_lib.experiment.candidate import Candidate, Purpose
from trial_lib.experiment.entrypoint import arguments_for
from trial_lib.experiment.environment import redact
from trial_lib.experiment.files import write_whole
from trial_lib.experiment.metrics import SEARCH_METRICS
from trial_lib.experiment.result import Outcome, TrialResult
from trial_lib.experiment.study import StudyPaths
from trial_lib.experiment.yaml_file import Experiment
from trial_lib.study.program import interpreter_of

# Sections of a DeepSpeed configuration that only a tuner reads.
TUNING_KEYS = ("autotuning",)


def best_result(results: Iterable[TrialResult], metric: str) -> TrialResult | None:
    """Returns the best completed trial, the submitted configuration's included; the earlier of equals."""
    best: TrialResult | None = None
    for result in results:
        if result.outcome is not Outcome.COMPLETED or result.purpose is Purpose.PROFILE or metric not in result.metrics:
            continue
        if best is None or SEARCH_METRICS[metric].better(result.metrics[metric], than=best.metrics[metric]):
            best = result
    return best


def gain(best: TrialResult, submitted: TrialResult | None, metric: str) -> float | None:
    """Returns how many times better than the submitted configuration the best is; None where that did not complete."""
    if submitted is None or submitted.outcome is not Outcome.COMPLETED:
        return None
    ours, theirs = best.metrics[metric], submitted.metrics[metric]
    if SEARCH_METRICS[metric].smaller_is_better:
        ours, theirs = theirs, ours
    # A model without a matrix product has no FLOPs to compare.
    return ours / theirs if theirs else None


def without_tuning_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without the sections that only a tuner reads; one ends the process after a few steps."""
    return {key: value for key, value in config.items() if key not in TUNING_KEYS}


def winning_config(experiment: Experiment, candidate: Candidate) -> dict[str, Any]:
    """Returns the configuration to train with: the user's own with the candidate merged in, and no tuning key."""
    return candidate.complete(without_tuning_keys(experiment.ds_config))


def training_command(
    experiment: Experiment, config: dict[str, Any], paths: StudyPaths, device: str, environment: Mapping[str, str]
) -> str:
    """Returns what to type to train with the winning configuration, under the conditions it was measured in.

    Args:
        experiment: what the user submitted.
        config: the winning configuration.
        paths: the study's files, that configuration's among them.
        device: `cuda` or `cpu`.
        environment: what the trials' ranks started from.
    """
    entrypoint = experiment.entrypoint
    variables, secrets = _environment(experiment, environment)
    assignments = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    if entrypoint.trial_class is not None:
        words = [_beside(sys.executable, "zerotune"), "train", str(paths.experiment), str(experiment.model_dir)]
        return assignments + shlex.join([*words, "--ds-config", str(paths.best_ds_config)]) + "\n"
    arguments, _ = arguments_for(entrypoint, paths.best_ds_config, experiment.config.arg_mappings, config)
    ranks = "--num_gpus" if device == "cuda" else "--num_accelerators"
    target = ["--module", entrypoint.module] if entrypoint.module else [entrypoint.script or ""]
    slots = str(experiment.config.resources.slots_per_trial)
    local_rank = [] if entrypoint.passes_local_rank else ["--no_local_rank"]
    words = [_beside(interpreter_of(experiment), "deepspeed"), ranks, slots, *local_rank, *target, *arguments]
    lines = [f"cd {shlex.quote(str(experiment.model_dir))}", assignments + shlex.join(words)]
    if secrets:
        lines.insert(0, f"# Set these first, whose values are not written down: {' '.join(secrets)}")
    if not entrypoint.config_positions:
        lines.insert(0, f"# The program takes its configuration in code: have it read {paths.best_ds_config}")
    return "\n".join(lines) + "\n"


def _environment(experiment: Experiment, variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that the trials had and a shell may not have, and the names of those that are secret."""
    own = experiment.environment_variables
    secrets = [name for name, value in redact(own).items() if value != own[name]]
    wanted = {"OMP_NUM_THREADS", "PYTHONPATH", *own} - set(secrets)
    return {
        name: variables[name]
        for name in sorted(wanted)
        if name in variables and os.environ.get(name) != variables[name]
    }, secrets


def _beside(interpreter: str, name: str) -> str:
    """Returns how to call a program of an environment: by its path where a shell would find another one or none."""
    program = Path(interpreter).with_name(name)
    return name if shutil.which(name) == str(program) else str(program)


def write_answer(
    experiment: Experiment,
    candidate: Candidate,
    best: TrialResult,
    submitted: TrialResult | None,
    metric: str,
    paths: StudyPaths,
    device: str,
    environment: Mapping[str, str],
) -> None:
    """Writes the winning configuration, what it measured, and the command to train with it."""
    config = winning_config(experiment, candidate)
    write_whole(paths.best_ds_config, json.dumps(config, indent=2) + "\n")
    metrics = {
        "metric": metric,
        "trial": best.number,
        "gain": gain(best, submitted, metric),
        "metrics": best.metrics,
        "submitted": submitted.metrics if submitted is not None else {},
    }
    write_whole(paths.best_ds_metrics, json.dumps(metrics, indent=2) + "\n")
    write_whole(paths.best_command, training_command(experiment, config, paths, device, environment))
