"""The result of a study, as sentences on standard error and as JSON."""

import json
import shlex
from pathlib import Path
from typing import Any

from flows.interrupts import interrupts
from flows.terminal import say, say_ways
from trial_lib.full_experiment.open import read_full_experiment
from trial_lib.records.answer_line import NONE_FOUND
from trial_lib.records.failure_cause import without_log
from trial_lib.records.planned_trials import PlannedTrials
from trial_lib.records.result import Outcome
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.study_folder import StudyStatus
from trial_lib.report.leaderboard import LeaderboardRow, leaderboard
from trial_lib.report.log_ends import first_failed
from trial_lib.search.methods import METHODS
from trial_lib.study.confirm.of_study import Answer, answer_of, since_last_study
from trial_lib.study.kept.history import SUBMITTED_NUMBER
from trial_lib.study.opening.open_study import OpenStudy

_LAST_LINES = 15


def result_document(study: OpenStudy) -> dict[str, Any]:
    """Returns the result of a study, as JSON."""
    driver, record = study.driver, study.record
    rows = leaderboard(driver.state.results, driver.state.candidates, record.metric)
    found = record.status is StudyStatus.COMPLETED
    answer = answer_of(driver) if found else None
    best = next((row for row in rows if answer is not None and row.trial == answer.best.number), None)
    largest = _largest(rows) if found and not METHODS[record.method].confirms_winner else None
    compared = since_last_study(driver) if found else None
    full_experiment = read_full_experiment(study)
    planned = PlannedTrials.in_file(study.paths.planned_trials)
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
        "best": None if answer is None or best is None else {**best.model_dump(mode="json"), **_promise(answer, best)},
        "largest": largest.model_dump(mode="json") if largest else None,
        "best_ds_config": _json_in(study.paths.best_ds_config) if found else None,
        "best_ds_config_path": str(study.paths.best_ds_config) if found else None,
        "command": study.paths.best_command.read_text() if found and study.paths.best_command.is_file() else None,
        "full_experiment": None if full_experiment is None else full_experiment.model_dump(mode="json"),
        "report": str(study.paths.report) if study.paths.report.exists() else None,
        "tracking_uri": study.tracker.tracking_uri,
        "trials": [row.model_dump(mode="json") for row in rows],
    }


def tell_result(study: OpenStudy, document: dict[str, Any]) -> None:
    """Prints the result of a study, on standard error."""
    record = study.record
    say()
    if record.status is StudyStatus.CANCELLED:
        say(interrupts.message)
        return
    if record.status is not StudyStatus.COMPLETED:
        say(f"{document['headline']} {record.reason}".rstrip())
        _tell_last_words(study)
        return
    best, largest = document["best"], document["largest"]
    if largest is not None:
        say(f"Largest micro-batch: {_size(largest)}. {_why_not_larger(document['trials'], largest)}")
        say(f"Fastest micro-batch: {_size(best)}.")
    if record.finding:
        say(record.finding)
        for note in (document["confirmation"] or {}).get("notes", ()):
            say(note)
    elif study.driver.state.submitted is None:
        was_begun = SUBMITTED_NUMBER in study.driver.state.candidates
        why = "its trial was killed twice" if was_begun else "your code decides its batch"
        say(f"Your configuration was not measured, because {why}. So there is no gain.")
    else:
        say("Your configuration did not complete, so there is no gain.")
    if largest is None:
        say(best_line(record.metric, document))
    if record.reason:
        say(record.reason)
    for account in document["why"]:
        if account["role"] in ("winner", "own"):
            say(f"Why: {account['sentence']} {account['advice']}".rstrip())
    if document["since_last"] is not None:
        kind = "REGRESSION" if document["since_last"]["is_regression"] else "The winner"
        say(f"{kind}: {document['since_last']['sentence']}")
    if document["planned"] is not None:
        say(document["planned"]["sentence"])
    say(f"Configuration: {study.paths.best_ds_config}")
    say(f"Train with it: sh {study.paths.best_command}")
    if study.paths.report.exists():
        say(f"Report:        {study.paths.report}")
    say_ways("All trials:", study.tracker.ways)
    if study.tracker.last_error:
        say(f"Some records have not reached MLflow ({study.tracker.last_error}). The study's folder has them all.")
        say(f"Send it later: {shlex.join(['zerotune', 'sync', str(study.paths.root)])}")


def best_line(metric: str, document: dict[str, Any]) -> str:
    """Returns the line with the best trial and its speed.

    Args:
        metric: the study's.
        document: as `result_document` returns it.
    """
    best, winner = document["best"], (document["confirmation"] or {}).get("winner")
    speeds = _speeds(metric, SEARCH_METRICS[metric].shown(best["value"]), best)
    # The trial is the one in the middle, but each figure is a median of its own.
    count = 0 if winner is None else len(winner["trials"])
    of_all = f" (median of {count} confirming trials)" if count > 1 else ""
    return f"Best trial:    {best['trial']:04d}, {best['label']}: {speeds}{of_all}"


def tell_failed_training(study: OpenStudy, reason: str) -> None:
    """Prints why the full experiment failed, and how to resume it."""
    say(f"The full experiment failed. {reason}")
    say(f"Its files:     {study.paths.full_experiment.root}")
    say(f"Fix that, then resume with: {interrupts.resume_command}")


def _json_in(file: Path) -> Any:
    """Returns the content of a file of the answer; None if it could not be written."""
    return json.loads(file.read_text()) if file.is_file() else None


def _promise(answer: Answer, best: LeaderboardRow) -> dict[str, float | None]:
    """Returns the winner's metrics: the medians of its confirming trials, if it has any."""
    metrics = answer.best.metrics
    return {"value": metrics.get(best.metric), "throughput": metrics.get("throughput")}


def _largest(rows: list[LeaderboardRow]) -> LeaderboardRow | None:
    """Returns the completed trial with the largest micro-batch."""
    return max((row for row in rows if row.value is not None), key=lambda row: row.micro_batch_size, default=None)


def _speeds(metric: str, value: str, row: dict[str, Any]) -> str:
    samples = "" if metric == "throughput" else f", {_throughput(row)}"
    return f"{metric} {value}{samples}"


def _size(row: dict[str, Any]) -> str:
    return f"{row['micro_batch_size']} (trial {row['trial']:04d}, {_throughput(row)})"


def _throughput(row: dict[str, Any]) -> str:
    return SEARCH_METRICS["throughput"].shown(row["throughput"])


def _why_not_larger(trials: list[dict[str, Any]], largest: dict[str, Any]) -> str:
    """Returns how the next larger micro-batch ended."""
    larger = [trial for trial in trials if trial["micro_batch_size"] > largest["micro_batch_size"]]
    if not larger:
        return "No larger one was tried, because of --max-trials or --max-micro-batch."
    smallest = min(larger, key=lambda trial: trial["micro_batch_size"])
    return f"{smallest['micro_batch_size']} is {smallest['outcome']}: {smallest['reason']}"


def _tell_last_words(study: OpenStudy) -> None:
    """Prints the traceback of the trial whose reason is the study's, or the end of its log."""
    results = sorted(study.driver.state.results.values(), key=lambda result: result.number, reverse=True)
    # Another cause, such as a full disk, may have ended the study after a trial had failed.
    quoted = (each for each in results if each.reason and without_log(each.reason) in study.record.reason)
    failed = next(quoted, None)
    if failed is None or not failed.logs or failed.outcome is Outcome.COMPLETED:
        return
    record = first_failed(failed, study.paths)
    if record.failure is not None and record.failure["ended_early"]:
        return
    if record.failure is not None:
        say(record.failure["traceback"])
    else:
        say("\n".join(record.log_tail.splitlines()[-_LAST_LINES:]))
    say(f"The whole log: {record.log}")
