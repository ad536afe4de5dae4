"""The tuning commands and `train`, after their arguments are read: servers, the run, the live view and its result."""

import json
import logging
import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotune.flows.flow_run import RunningStudy, finish, missing_files, run_flow, told_if_ended
from zerotune.flows.interrupts import interrupts
from zerotune.flows.live_view import LiveView
from zerotune.flows.prefect_server import ServerError, prefect_server, require_home, require_server_for_all
from zerotune.flows.terminal import print_document, say, say_ways
from zerotune.trial_lib.messages.errors import InputError, plain
from zerotune.trial_lib.plan.plan_record import PlannedTrials
from zerotune.trial_lib.records.folders import OwnCommand, StudyStatus, full_experiment_id
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, without_log
from zerotune.trial_lib.records.units import NONE_FOUND
from zerotune.trial_lib.report.read_study import first_failed
from zerotune.trial_lib.report.study_view import leaderboard
from zerotune.trial_lib.search.methods import METHODS
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.confirm import OF_THE_ANSWER, answer_of, since_last_study
from zerotune.trial_lib.study.folder import INTERRUPTED
from zerotune.trial_lib.study.full_experiment import LONGEST_END_S, FullExperiment, TrainingArguments
from zerotune.trial_lib.study.open_full_experiment import new_full_experiment, read_full_experiment, resume_newest
from zerotune.trial_lib.study.open_study import (
    OpenStudy,
    open_planned,
    plan_study,
    require_accepted_config,
    resume_study,
)

if TYPE_CHECKING:
    from prefect import Flow


# The result of a study, as sentences on standard error and as JSON.

_LAST_LINES = 15


def result_document(study: OpenStudy) -> dict[str, Any]:
    driver, record = study.driver, study.record
    rows = leaderboard(driver.state.results, driver.state.candidates, record.metric)
    found = record.status is StudyStatus.COMPLETED
    answer = answer_of(driver) if found else None
    best = next((row for row in rows if answer is not None and row.trial == answer.best.number), None)
    measured = [row for row in rows if row.value is not None and found and not METHODS[record.method].confirms_winner]
    largest = max(measured, key=lambda row: row.micro_batch_size, default=None)
    compared = since_last_study(driver) if found else None
    full_experiment = read_full_experiment(study)
    planned = PlannedTrials.in_file(study.paths.planned_trials)
    # The winner's metrics are those of all its confirming trials together, if it has any.
    metrics = {} if answer is None else answer.best.metrics
    promise = {} if best is None else {"value": metrics.get(best.metric), "throughput": metrics.get("throughput")}
    # A file of the answer may not have been written.
    ds_config, command = study.paths.best_ds_config, study.paths.best_command
    return {
        "study": record.study_id,
        "folder": str(study.paths.root),
        "status": record.status.value,
        "reason": record.reason,
        "headline": record.finding or (NONE_FOUND if record.status is StudyStatus.FAILED else ""),
        "metric": record.metric,
        "gain": record.gain,
        "gain_interval": record.gain_interval,
        "confirmation": answer.finding.document() if answer is not None and answer.finding is not None else None,
        "why": [] if answer is None else [account.document() for account in answer.why],
        "since_last": None if compared is None else compared.document(),
        "planned": None if planned is None else planned.document(),
        "best": None if answer is None or best is None else {**best.model_dump(mode="json"), **promise},
        "largest": largest.model_dump(mode="json") if largest else None,
        "best_ds_config": json.loads(ds_config.read_text()) if found and ds_config.is_file() else None,
        "best_ds_config_path": str(ds_config) if found else None,
        "command": command.read_text() if found and command.is_file() else None,
        "diff": own.diff or None if found and (own := OwnCommand.of(study.paths)) is not None else None,
        "full_experiment": None if full_experiment is None else full_experiment.model_dump(mode="json"),
        "report": str(study.paths.report) if study.paths.report.exists() else None,
        "tracking_uri": study.tracker.tracking_uri,
        "trials": [row.model_dump(mode="json") for row in rows],
    }


def tell_result(study: OpenStudy, document: dict[str, Any]) -> None:
    record = study.record
    say()
    if record.status is StudyStatus.CANCELLED:
        say(interrupts.message)
        return
    if record.status is not StudyStatus.COMPLETED:
        say(f"{document['headline']} {record.reason}".rstrip())
        _tell_last_words(study)
        return
    # The gain, or why there is none.
    best, largest = document["best"], document["largest"]
    if largest is not None:
        say(f"Largest micro-batch: {_size(largest)}. {_why_not_larger(document['trials'], largest)}")
        say(f"Fastest micro-batch: {_size(best)}.")
    if record.finding:
        say(record.finding)
        for note in (document["confirmation"] or {}).get("notes", ()):
            say(note)
    elif study.driver.state.submitted is None:
        why = "its trial was killed twice" if study.driver.state.has_asked_for_own else "your code decides its batch"
        say(f"Your configuration was not measured, because {why}. So there is no gain.")
    else:
        say("Your configuration did not complete, so there is no gain.")
    if largest is None:
        say(best_line(record.metric, document))
    if record.reason:
        say(record.reason)
    # Why, and compared with what.
    for account in document["why"]:
        if account["role"] in ("winner", "own"):
            say(f"Why: {account['sentence']} {account['advice']}".rstrip())
    if document["since_last"] is not None:
        kind = "REGRESSION" if document["since_last"]["is_regression"] else "The winner"
        say(f"{kind}: {document['since_last']['sentence']}")
    if document["planned"] is not None:
        say(document["planned"]["sentence"])
    # Where it all is.
    say(f"Configuration: {study.paths.best_ds_config}")
    if document["diff"]:
        say(f"It changes your files so, and `zerotune apply` writes that:\n{document['diff']}")
    say(f"Train with it: sh {study.paths.best_command}")
    if study.paths.report.exists():
        say(f"Report:        {study.paths.report}")
    say_ways("All trials:", study.tracker.ways)
    if study.tracker.last_error:
        say(f"Some records have not reached MLflow ({study.tracker.last_error}). The study's folder has them all.")
        say(f"Send it later: {shlex.join(['zerotune', 'sync', str(study.paths.root)])}")


def best_line(metric: str, document: dict[str, Any]) -> str:
    best, winner = document["best"], (document["confirmation"] or {}).get("winner")
    speeds = f"{metric} {SEARCH_METRICS[metric].shown(best['value'])}"
    if metric != "throughput":
        speeds += f", {_throughput(best)}"
    # The trial is the one in the middle, but each figure is of all of them.
    count = 0 if winner is None else len(winner["trials"])
    of_all = f" (over {count} confirming trials)" if count > 1 else ""
    return f"Best trial:    {best['trial']:04d}, {best['label']}: {speeds}{of_all}"


def _size(row: dict[str, Any]) -> str:
    return f"{row['micro_batch_size']} (trial {row['trial']:04d}, {_throughput(row)})"


def _throughput(row: dict[str, Any]) -> str:
    return SEARCH_METRICS["throughput"].shown(row["throughput"])


def _why_not_larger(trials: list[dict[str, Any]], largest: dict[str, Any]) -> str:
    larger = [trial for trial in trials if trial["micro_batch_size"] > largest["micro_batch_size"]]
    if not larger:
        return "No larger one was tried, because of --max-trials or --max-micro-batch."
    smallest = min(larger, key=lambda trial: trial["micro_batch_size"])
    return f"{smallest['micro_batch_size']} is {smallest['outcome']}: {smallest['reason']}"


def _tell_last_words(study: OpenStudy) -> None:
    # Prints the traceback of the trial whose reason is the study's, or the end of its log.
    results = sorted(study.driver.state.results.values(), key=lambda result: result.number, reverse=True)
    # Another cause, such as a full disk, may have ended the study after a trial had failed.
    quoted = (each for each in results if each.reason and without_log(each.reason) in study.record.reason)
    failed = next(quoted, None)
    if failed is None or not failed.logs or failed.outcome is Outcome.COMPLETED:
        return
    record = first_failed(failed, study.paths)
    if record.failure is not None and record.failure.ended_early:
        return
    if record.failure is not None:
        say(record.failure.traceback)
    else:
        say("\n".join(record.log_tail.splitlines()[-_LAST_LINES:]))
    say(f"The whole log: {record.log}")


# A tuning command after its arguments are read: start the servers, run the flow, print the answer, stop everything.

WRONG_INPUT, FULL_EXPERIMENT_FAILED, REGRESSED, FILE_MISSING = 2, 3, 4, 5
_BEGUN_END_S = 5.0  # for the end of a profile trial that ran while a server did not start
_STATUS_EXIT = {StudyStatus.COMPLETED: 0, StudyStatus.FAILED: 1, StudyStatus.CANCELLED: 130, StudyStatus.RUNNING: 1}


def tune_command(arguments: StudyArguments, as_json: bool) -> int:
    """Raises InputError: the input is wrong. Nothing was started."""
    require_home()
    require_server_for_all(arguments.ray_address)
    with interrupts.opening():
        planned = plan_study(arguments, Path.cwd(), tell=say, check=interrupts.check)
        interrupts.check()
        study = open_planned(planned)
    return _run(study, as_json)


def resume_command(root: Path, as_json: bool) -> int:
    """Raises InputError: there is nothing to resume."""
    require_home()
    with interrupts.opening():
        study = resume_study(root)
    try:
        require_server_for_all(study.driver.setup.arguments.ray_address)
    except InputError:
        study.close()
        raise
    return _run(study, as_json)


def _run(study: OpenStudy, as_json: bool) -> int:
    # What the user sees before the servers are up.
    study.config_check.ask()
    arguments = study.driver.setup.arguments
    interrupts.resume_command = shlex.join(["zerotune", "resume", str(study.paths.root)])
    for note in study.driver.setup.experiment.notes:
        say(f"note: {note}")
    study.driver.log.debug("the study is open, and its servers are starting")
    say(f"study: {study.paths.root}")
    say(f"tracking: {study.tracker.tracking_uri}")
    running = RunningStudy(study)
    show = shlex.join(["zerotune", "show", str(study.paths.root)])
    interrupts.ended = told_if_ended("the study", lambda: running.study.record, f"it with: {show}")
    noting = interrupts.noting(running.interrupt)
    try:
        with noting, LiveView(study.paths, arguments) as view, prefect_server() as server:
            # The end of the command prints the answer, but not beside a document.
            study.driver.log.addHandler(NoteHandler(view.note, but_for=() if as_json else OF_THE_ANSWER))
            # The words of a command may be secrets. Only the study's folder keeps them.
            shown = {**dict(arguments), "command": (), "study_dir": study.paths.root}
            runs = [study.record.study_id]
            if arguments.run_full_experiment:
                runs.append(full_experiment_id(study.record.study_id))

            def load() -> "Flow[..., Any]":
                from zerotune.flows.tune import tune_open

                return tune_open(running)

            run_flow(
                server,
                load,
                runs,
                study.driver.log,
                is_down=lambda: running.is_down,
                check=lambda: require_accepted_config(study, interrupts.aside),
                begin=study.driver.begin_profile,
                has_begun=lambda: running.has_begun,
                **shown,
            )
        study = running.study
        if study.record.status is StudyStatus.RUNNING:
            raise ServerError("The Prefect server ended before the study had begun.")
        interrupts.check()
    except (KeyboardInterrupt, Exception) as error:
        if not interrupts.heard:
            # No trial may run when the end of the study is written.
            study.driver.cancel()
            study.driver.await_begun(_BEGUN_END_S)
            if isinstance(error, InputError):
                interrupts.resume_command = None
                if study.is_new and not any(study.paths.trials.glob("*")):
                    # Wrong input that shows only now leaves nothing, as any other does.
                    study.remove()
                    raise
            if study.record.status is StudyStatus.RUNNING:
                finish(study, StudyStatus.FAILED, str(error) or type(error).__name__)
            raise
        study = running.study
        # The signal came before the flow began, or the flow has cleaned up and raised it again.
        if study.record.status is StudyStatus.RUNNING:
            finish(study, StudyStatus.CANCELLED, INTERRUPTED)
    finally:
        study.close()
        study.driver.log.debug("everything is down")
    return _tell_end(running, as_json)


def _tell_end(running: RunningStudy, as_json: bool) -> int:
    # Prints the result of a study that has ended. Returns the exit code.
    study = running.study
    if interrupts.heard and not as_json:
        return _STATUS_EXIT[StudyStatus.CANCELLED]
    document = result_document(study)
    if as_json:
        print_document(document)
    else:
        tell_result(study, document)
    missing = missing_files(study)
    if missing:
        say(f"Not written: {', '.join(missing)}. The reason: {study.paths.log}. `zerotune show` writes the report.")
    if running.training_failure is not None:
        say(f"The full experiment failed. {running.training_failure}")
        say(f"Its files:     {study.paths.full_experiment.root}")
        say(f"Fix that, then resume with: {interrupts.resume_command}")
        return FULL_EXPERIMENT_FAILED
    if running.is_refused:
        return WRONG_INPUT
    if study.record.regression:
        return REGRESSED
    if missing:
        return FILE_MISSING
    return _STATUS_EXIT[study.record.status]


class NoteHandler(logging.Handler):
    """Shows the messages of a log without tracebacks. The log's file has those."""

    def __init__(self, show: Callable[[str], None], but_for: Collection[str] = ()) -> None:
        super().__init__(logging.INFO)
        self._show, self._but_for = show, but_for

    def emit(self, record: logging.LogRecord) -> None:
        if not any(name in vars(record) for name in self._but_for):
            self._show(plain(record.getMessage()))


# `zerotune train`, after its arguments are read: start a server, run the flow, print how it ended, stop everything.

_TRAINING_EXIT = {StudyStatus.COMPLETED: 0, StudyStatus.CANCELLED: 130}


def train_command(arguments: TrainingArguments, resume: bool, as_json: bool) -> int:
    """With `resume`, the newest full experiment of the same name is resumed that has not reached its end.
    Raises InputError: the input is wrong. Nothing was started.
    """
    require_home()
    open_it = resume_newest if resume else new_full_experiment
    with interrupts.opening():
        full_experiment = open_it(arguments, Path.cwd())
    return _run_train(full_experiment, arguments, as_json)


def _run_train(full_experiment: FullExperiment, arguments: TrainingArguments, as_json: bool) -> int:
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
                from zerotune.flows.tune import experiment_open

                return experiment_open(full_experiment)

            shown = {"experiment_dir": root, **dict(arguments)}
            is_down, has_begun = lambda: full_experiment.is_down, lambda: full_experiment.has_begun
            run_flow(server, load, [name], log, is_down, has_begun=has_begun, **shown)
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
    return _TRAINING_EXIT.get(full_experiment.record.status, FULL_EXPERIMENT_FAILED)


def _resume_command(arguments: TrainingArguments) -> str:
    words = ["zerotune", "train", str(arguments.config_path), str(arguments.model_dir)]
    if arguments.ds_config is not None:
        words += ["--ds-config", str(arguments.ds_config)]
    for path in arguments.include:
        words += ["--include", str(path)]
    return shlex.join([*words, "--resume"])


def _document(full_experiment: FullExperiment) -> dict[str, Any]:
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
    # Prints how a full experiment ended, on standard error.
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
