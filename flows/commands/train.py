"""`zerotune train`, after its arguments are read: start a server, run the flow, print how it ended, stop everything."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.commands.tuning import FULL_EXPERIMENT_FAILED, NoteHandler
from flows.ending import told_if_ended
from flows.flow_run import run_flow
from flows.interrupts import interrupts
from flows.servers.prefect_server import prefect_server, require_home
from flows.servers.service import ServerError
from flows.terminal import print_document, say, say_ways
from trial_lib.full_experiment.driver import LONGEST_END_S, FullExperiment, TrainingArguments
from trial_lib.full_experiment.open import new_full_experiment, resume_newest
from trial_lib.records.study_folder import StudyStatus
from trial_lib.study.kept.folder import INTERRUPTED

if TYPE_CHECKING:
    from prefect import Flow

_STATUS_EXIT = {StudyStatus.COMPLETED: 0, StudyStatus.CANCELLED: 130}


def train_command(arguments: TrainingArguments, resume: bool, as_json: bool) -> int:
    """Trains at full length, and prints how the training ended.

    Args:
        arguments: the full experiment's.
        resume: whether to resume the newest full experiment of the same name that has not reached its end.
        as_json: whether to print one JSON document on standard output.

    Returns:
        The exit code.

    Raises:
        InputError: the input is wrong. Nothing was started.
    """
    require_home()
    open_it = resume_newest if resume else new_full_experiment
    with interrupts.opening():
        full_experiment = open_it(arguments, Path.cwd())
    return _run(full_experiment, arguments, as_json)


def _run(full_experiment: FullExperiment, arguments: TrainingArguments, as_json: bool) -> int:
    interrupts.resume_command = _resume_command(arguments)
    root = full_experiment.paths.root
    interrupts.ended = told_if_ended("the training", lambda: full_experiment.record, f"its folder: {root}")
    log = full_experiment.log
    for note in full_experiment.experiment.notes:
        say(f"note: {note}")
    say(f"full experiment: {root}")
    say(f"tracking: {full_experiment.tracker.tracking_uri}")
    log.addHandler(NoteHandler(say))
    try:
        with interrupts.noting(full_experiment.interrupt, LONGEST_END_S), prefect_server() as server:
            name = full_experiment.record.experiment_id

            def load() -> "Flow[..., Any]":
                from flows.experiment import experiment_open

                return experiment_open(full_experiment)

            def is_down() -> bool:
                return full_experiment.is_down

            def has_begun() -> bool:
                return full_experiment.has_begun

            run_flow(server, load, [name], log, is_down, has_begun=has_begun, experiment_dir=root, **dict(arguments))
        interrupts.check()
    except (KeyboardInterrupt, Exception) as error:
        if interrupts.heard:
            # The signal came before the flow began, or the flow has cleaned up and raised it again.
            full_experiment.stop()
            full_experiment.finish(StudyStatus.CANCELLED, INTERRUPTED)
        elif isinstance(error, ServerError):
            full_experiment.finish(StudyStatus.FAILED, str(error))
        else:
            raise
    finally:
        full_experiment.close()
        log.debug("everything is down")
    if as_json:
        print_document(_document(full_experiment))
    elif not interrupts.heard:
        _tell(full_experiment)
    return _STATUS_EXIT.get(full_experiment.record.status, FULL_EXPERIMENT_FAILED)


def _resume_command(arguments: TrainingArguments) -> str:
    words = ["zerotune", "train", str(arguments.config_path), str(arguments.model_dir)]
    if arguments.ds_config is not None:
        words += ["--ds-config", str(arguments.ds_config)]
    for path in arguments.include:
        words += ["--include", str(path)]
    return shlex.join([*words, "--resume"])


def _document(full_experiment: FullExperiment) -> dict[str, Any]:
    """Returns how a full experiment ended, as JSON."""
    record, paths = full_experiment.record, full_experiment.paths
    best = record.best_checkpoint
    return {
        "experiment": record.experiment_id,
        "folder": str(paths.root),
        "status": record.status.value,
        "reason": record.reason,
        "attempts": record.attempts,
        "batches": record.batches,
        "metric": full_experiment.experiment.config.searcher.metric,
        "best_checkpoint": None if best is None else str(paths.checkpoints / best),
        "best_metric": record.best_metric,
        "validation": full_experiment.validation,
        "ds_config": record.ds_config,
        "tracking_uri": full_experiment.tracker.tracking_uri,
    }


def _tell(full_experiment: FullExperiment) -> None:
    """Prints how a full experiment ended, on standard error."""
    record, paths, tracker = full_experiment.record, full_experiment.paths, full_experiment.tracker
    say("")
    if record.status is StudyStatus.CANCELLED:
        say(interrupts.message)
        return
    done = "" if record.batches is None else f" {record.batches} batches"
    if record.status is StudyStatus.COMPLETED:
        say(f"Trained{done} to the end." if done else "The training has reached its end.")
    else:
        say(f"The full experiment failed{f' after{done}' if done else ''}. {record.reason}")
        say(f"Fix that, then resume with: {interrupts.resume_command}")
    if record.best_checkpoint is not None:
        metric = full_experiment.experiment.config.searcher.metric
        value = "" if record.best_metric is None else f", {metric} {record.best_metric:.6g}"
        say(f"Best checkpoint: {paths.checkpoints / record.best_checkpoint}{value}")
    say(f"Folder:          {paths.root}")
    say_ways("In MLflow:", tracker.ways, width=17)
    if tracker.last_error:
        say(f"Some records have not reached MLflow ({tracker.last_error}). The folder has them all.")
        say(f"Send it later:   {shlex.join(['zerotune', 'sync', str(paths.root)])}")
