"""The answer of a study: the best configuration, its gain, and the files that hold it."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from trial_lib.deepspeed_config.overrides import with_open_batch
from trial_lib.messages.files import write_whole
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult
from trial_lib.records.switches import deepspeed_part
from trial_lib.study.history import PROFILE_NUMBER, StudyState
from trial_lib.study.program import KnownProgram
from trial_lib.study.setup import StudySetup
from trial_lib.study.training_command import training_command


def best_result(results: Iterable[TrialResult], metric: str) -> TrialResult | None:
    """Returns the completed trial with the best metric, or None. Of equal ones it is the earlier.

    The trial of the user's configuration counts, and the profile trial does not.
    """
    best: TrialResult | None = None
    for result in results:
        if result.outcome is not Outcome.COMPLETED or result.purpose is Purpose.PROFILE or metric not in result.metrics:
            continue
        if best is None or SEARCH_METRICS[metric].better(result.metrics[metric], than=best.metrics[metric]):
            best = result
    return best


def ignored_batch_reason(state: StudyState) -> str | None:
    """Returns why the program ignores the requested micro-batch size, or None if it does not.

    The program ignores it if no larger size than the profile trial's has ever arrived. The profile trial cannot show
    that for a program that has its own size in its code.
    """
    results, candidates = state.results, state.candidates
    profiled = 1 if state.profile is None else candidates[PROFILE_NUMBER].micro_batch_size
    ignored = None
    for number, result in results.items():
        if candidates[number].micro_batch_size <= profiled or result.purpose is Purpose.SUBMITTED:
            continue
        if result.outcome is Outcome.COMPLETED:
            return None
        if ignored is None and result.outcome is Outcome.INVALID and result.micro_batch_arrived == profiled:
            ignored = result.reason
    return ignored


def untuned_batch(state: StudyState) -> str:
    """Returns why only the program's own micro-batch size is measured, in sentences; empty if others are.

    A program that ignores the requested size can be tuned in everything else, if what was typed agrees with what
    arrives. The profile trial has shown that it does, or the first trial of a larger size has.
    """
    program = None if state.profile is None else state.profile.program
    typed = None if program is None else program.typed_batch
    if program is None or typed is None:
        return ""
    size = typed.micro_batch_size
    agrees = program.rows_per_sample == 1 and size == state.candidates[PROFILE_NUMBER].micro_batch_size
    reason = program.fixed_batch or (ignored_batch_reason(state) if agrees else None)
    return f"The micro-batch was not tuned and stays {size}. {reason}" if reason else ""


def gain(best: TrialResult, submitted: TrialResult | None, metric: str) -> float | None:
    """Returns how many times better the best trial is than the user's configuration; None if that did not complete."""
    if submitted is None or submitted.outcome is not Outcome.COMPLETED:
        return None
    ours, theirs = best.metrics[metric], submitted.metrics[metric]
    if SEARCH_METRICS[metric].smaller_is_better:
        ours, theirs = theirs, ours
    # A model without a matrix product has no FLOPs to compare.
    return ours / theirs if theirs else None


def write_answer(setup: StudySetup, known: KnownProgram, winner: Candidate, measured: Mapping[str, Any]) -> None:
    """Writes the winning configuration, its measurements, and the command to train with it.

    Args:
        setup: the study's.
        known: the user's program.
        winner: the winning candidate.
        measured: its measurements and their confirmation, as JSON.
    """
    config = deepspeed_part(winner.complete(known.base_config))
    written = with_open_batch(known.in_file(config), known.own_config(setup.experiment))
    write_whole(setup.paths.best_ds_config, json.dumps(written, indent=2) + "\n")
    write_whole(setup.paths.best_ds_metrics, json.dumps(measured, indent=2) + "\n")
    command = training_command(setup, known, config, winner.switches)
    try:
        if setup.experiment.entrypoint.wrapper:
            # This runs the wrapper once more, and an interrupt may end that.
            command = training_command(setup, known, config, winner.switches, by_wrapper=True)
    finally:
        write_whole(setup.paths.best_command, command)
