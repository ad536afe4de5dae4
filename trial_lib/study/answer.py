"""The answer of a study: which configuration to use, and how."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from trial_lib.deepspeed_config.overrides import without_tuning_keys
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.study_folder import StudyPaths
from trial_lib.study.known_program import KnownProgram
from trial_lib.study.training_command import training_command
from trial_lib.wire.whole_files import write_whole


def best_result(results: Iterable[TrialResult], metric: str) -> TrialResult | None:
    """Returns the best completed trial, the user's configuration's included; the earlier of equals."""
    best: TrialResult | None = None
    for result in results:
        if result.outcome is not Outcome.COMPLETED or result.purpose is Purpose.PROFILE or metric not in result.metrics:
            continue
        if best is None or SEARCH_METRICS[metric].better(result.metrics[metric], than=best.metrics[metric]):
            best = result
    return best


def ignored_batch_reason(results: Mapping[int, TrialResult], candidates: Mapping[int, Candidate]) -> str | None:
    """Returns why no batches but the profile's arrive; None where larger ones do, or were never asked for.

    Where that is the program's own size, the profile trial does not find out a program that has it in its code.
    """
    profiles = (number for number, result in results.items() if result.purpose is Purpose.PROFILE)
    profiled = min((candidates[number].micro_batch_size for number in profiles), default=1)
    larger = [
        result
        for number, result in results.items()
        if candidates[number].micro_batch_size > profiled and result.purpose is not Purpose.SUBMITTED
    ]
    if any(result.outcome is Outcome.COMPLETED for result in larger):
        return None
    ignored = (r for r in larger if r.outcome is Outcome.INVALID and r.micro_batch_arrived == profiled)
    return next((result.reason for result in ignored), None)


def gain(best: TrialResult, submitted: TrialResult | None, metric: str) -> float | None:
    """Returns how many times better than the user's configuration the best is; None where that did not complete."""
    if submitted is None or submitted.outcome is not Outcome.COMPLETED:
        return None
    ours, theirs = best.metrics[metric], submitted.metrics[metric]
    if SEARCH_METRICS[metric].smaller_is_better:
        ours, theirs = theirs, ours
    # A model without a matrix product has no FLOPs to compare.
    return ours / theirs if theirs else None


def winning_config(base_config: Mapping[str, Any], candidate: Candidate) -> dict[str, Any]:
    """Returns the configuration to train with: the user's with the candidate merged in, and no tuning key."""
    return candidate.complete(without_tuning_keys(base_config))


def write_answer(
    experiment: Experiment,
    candidate: Candidate,
    measured: Mapping[str, Any],
    paths: StudyPaths,
    device: str,
    environment: Mapping[str, str],
    known: KnownProgram,
) -> None:
    """Writes the winning configuration, what it measured, and the command to train with it.

    Args:
        experiment: what the user submitted.
        candidate: the winner.
        measured: what it measured and how that was confirmed, as JSON.
        paths: the study's files.
        device: `cuda` or `cpu`.
        environment: what the trials' ranks started from.
        known: the user's program, as far as the study knows it.
    """
    config = winning_config(known.base_config, candidate)
    write_whole(paths.best_ds_config, json.dumps(config, indent=2) + "\n")
    write_whole(paths.best_ds_metrics, json.dumps(measured, indent=2) + "\n")
    command = training_command(experiment, config, paths, device, environment, known)
    write_whole(paths.best_command, command)
