"""What the parts of a study and a plan give Prefect: results, artifacts and progress."""

import json
import logging
import time
from pathlib import Path
from typing import cast
from uuid import NAMESPACE_URL, UUID, uuid5

from prefect import get_run_logger, task
from prefect.artifacts import (
    ProgressArtifact,
    TableArtifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import Artifact
from prefect.context import TaskRunContext
from prefect.events import emit_event

from zerotune.tasks.cancellation import hear_cancellation
from zerotune.tasks.telling import in_words, link_to_mlflow, told_if_possible
from zerotune.trial_lib.inputs.known_secrets import sent_command
from zerotune.trial_lib.launch.full_training import TrainingEnd
from zerotune.trial_lib.launch.trial_files import uncovered_after_all
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.plan.answer import fewest_sentence, likelihood
from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedDevices, PlanPaths, PlanRecord
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.records.switches import deepspeed_part
from zerotune.trial_lib.records.units import bytes_shown
from zerotune.trial_lib.report.estimate_report import estimate_of_profile
from zerotune.trial_lib.report.study_view import leaderboard, trial_columns
from zerotune.trial_lib.study.best_command import write_answer
from zerotune.trial_lib.study.confirm import (
    OF_THE_ANSWER,
    Answer,
    NoAnswer,
    answer_of,
    cut_short,
    search_found,
    since_last_study,
    starting_from,
)
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.finding import Confirmed
from zerotune.trial_lib.study.full_experiment import FullExperiment
from zerotune.trial_lib.study.profile_report import model_notes, program_notes
from zerotune.trial_lib.tracking.sync import Tracker

# The result of the profile trial, for the study, its log and Prefect.


@task(name="profile", cache_policy=NO_CACHE, persist_result=False)
def tell_profile(driver: StudyDriver) -> None:
    assert driver.state.profile is not None
    assert driver.state.profile.profile is not None
    profile, program = driver.state.profile.profile, driver.state.profile.program
    report = estimate_of_profile(driver.setup, driver.state.profiled, driver.known.base_config)
    write_whole(driver.setup.paths.profile, report.model_dump_json(indent=2))
    for line in report.lines():
        driver.log.info("%s", line)
    profiled = driver.state.profile
    experiment = driver.setup.experiment
    # The study has tried a layer over a folder of its own. The program's may have a reason for none.
    is_uncovered = profiled.files == "intercepted"
    uncovered = uncovered_after_all(experiment.model_dir, experiment.notes) if is_uncovered else ""
    mapped = experiment.config.arg_mappings
    notes = (profiled.note, uncovered, *program_notes(program, mapped), *model_notes(profile))
    for note in filter(None, notes):
        driver.log.warning("%s", note)
    rows = "\n".join(f"| {row.label} | {bytes_shown(row.states)} | {report.largest(row)} |" for row in report.rows)
    with told_if_possible(driver.log):
        create_markdown_artifact(
            "\n".join(
                [
                    "## Profile",
                    *(f"- {line}" for line in report.lines()[:2]),
                    "",
                    "| arm | states on a device | largest micro-batch |",
                    "|---|---|---|",
                    rows,
                ]
            ),
            key="profile",
            description="The memory that the model needs.",
        )


# The known winner that a study starts from, and how the new winner compares with it.

# The Prefect event for a winner that is slower than the last known one. Automations are triggered by it.
REGRESSION = "zerotune.regression"


@task(name="known winner", cache_policy=NO_CACHE, persist_result=False)
def tell_start(driver: StudyDriver) -> None:
    driver.log.info("%s", starting_from(driver))


@task(name="since the last study", cache_policy=NO_CACHE, persist_result=False)
def tell_since_last(driver: StudyDriver) -> None:
    """Reports how the winner compares with the last known one. Emits an event if it is slower beyond the noise."""
    compared = since_last_study(driver)
    if compared is None:
        return
    level = logging.WARNING if compared.is_regression else logging.INFO
    driver.log.log(level, "the winner: %s", compared.sentence, extra=OF_THE_ANSWER)
    if not compared.is_regression:
        return
    name = driver.setup.experiment.name
    with told_if_possible(driver.log):
        emit_event(
            REGRESSION,
            resource={"prefect.resource.id": f"zerotune.experiment.{name}", "prefect.resource.name": name},
            payload={"study_id": driver.setup.study_id, "folder": str(driver.setup.paths.root), **compared.document()},
            # Prefect stores it once, however often a study is resumed. An automation may run again after minutes.
            id=uuid5(NAMESPACE_URL, f"{REGRESSION}/{driver.setup.study_id}"),
        )


# The result of the confirming trials, for the log and for Prefect.


def tell_leader(driver: StudyDriver) -> None:
    """Writes what the search expects most of. Who is in a hurry need not wait for its confirmation."""
    found = search_found(driver)
    if found:
        driver.log.info("%s", found)


@task(name="confirm", cache_policy=NO_CACHE, persist_result=False)
def tell_finding(driver: StudyDriver) -> None:
    answer = answer_of(driver)
    if answer is None or answer.finding is None:
        return
    finding = answer.finding
    for line in (finding.sentence, *finding.lines):
        driver.log.info("%s", line, extra=OF_THE_ANSWER)
    rows = [_row(one, finding.metric) for one in (finding.own, *finding.candidates) if one is not None]
    with told_if_possible(driver.log):
        create_table_artifact(rows, key="confirmation", description=finding.sentence)


def _row(confirmed: Confirmed, metric: str) -> dict[str, str]:
    value = confirmed.metrics.get(metric)
    return {
        "configuration": "your configuration" if confirmed.verdict == "own" else confirmed.name,
        metric: SEARCH_METRICS[metric].shown(value),
        "gain": "" if confirmed.gain is None else confirmed.gain.times,
        "verdict": confirmed.verdict,
        "trials": " ".join(f"{number:04d}" for number in confirmed.trials),
        "note": confirmed.reason or confirmed.losses,
    }


# The answer of a study, written to its folder and shown in Prefect.


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report(driver: StudyDriver, answer: Answer, tracker: Tracker) -> None:
    write_answer(driver, answer)
    # `tell_finding` has logged a confirmed answer.
    measured = _measured(driver, answer)
    headline = [] if answer.finding is not None else [answer.sentence or measured]
    for line in dict.fromkeys([*headline, measured]):
        driver.log.info("%s", line, extra=OF_THE_ANSWER)
    with told_if_possible(driver.log):
        link_to_mlflow(tracker.ways, "mlflow", "The trials in MLflow")


def _measured(driver: StudyDriver, answer: Answer) -> str:
    best, metric = answer.best, driver.metric
    value = SEARCH_METRICS[metric].shown(best.metrics[metric])
    return f"Trial {best.number:04d} ({driver.state.label(best.number)}): {metric} {value}"


# A run's page shows its own artifacts before those of its tasks, in the order of their random ids. So one of these two
# is the only one of the run itself.


def show_answer(driver: StudyDriver, answer: Answer, tracker: Tracker) -> None:
    paths, measured = driver.setup.paths, _measured(driver, answer)
    headline, notes = answer.sentence or measured, () if answer.finding is None else answer.finding.lines
    config = deepspeed_part(driver.state.candidates[answer.best.number].complete(driver.known.base_config))
    said = filter(None, [*notes, cut_short(driver), *(account.sentences for account in answer.why)])
    lines = [
        f"## {headline}",
        *([] if headline == measured else [measured]),
        "```sh",
        sent_command(paths.best_command.read_text(), driver.setup.experiment.model_dir),
        "```",
        f"- the whole command: `sh {paths.best_command}`",
        f"- report, once the study has ended: `{paths.report}`",
        f"- trials in MLflow: {in_words(tracker.ways)}",
        f"- answer in MLflow: {in_words(tracker.run_ways)}",
        *(f"- {each}" for each in said),
        "```json",
        json.dumps(config, indent=2),
        "```",
    ]
    with told_if_possible(driver.log):
        create_markdown_artifact("\n".join(lines), key="best-configuration", description=headline)


def show_no_answer(driver: StudyDriver, none: NoAnswer) -> None:
    """Otherwise the artifact of an earlier study would stand there."""
    driver.log.warning("%s", none.sentence, extra=OF_THE_ANSWER)
    text = f"## {none.headline}\n{none.reason}\n- report, once the study has ended: `{driver.setup.paths.report}`"
    with told_if_possible(driver.log):
        create_markdown_artifact(text, key="best-configuration", description=none.headline)


# The progress bar and the leaderboard of a running study in Prefect.

_ROWS = 100
_SHARE = 0.05  # of the search's time at most is spent on updates


@task(name="search", cache_policy=NO_CACHE, persist_result=False)
def _begin_search() -> UUID | None:
    # The task run that has the artifacts of the search.
    context = TaskRunContext.get()
    return None if context is None else context.task_run.id


class Progress:
    """The two artifacts of a running study. Their updates take `_SHARE` of the search's time at most."""

    def __init__(self, driver: StudyDriver) -> None:
        self._driver, self._search = driver, _begin_search()
        self._bar: UUID | None = None
        self._next = 0.0

    def update(self) -> None:
        if time.monotonic() >= self._next:
            self.finish()

    def finish(self) -> None:
        driver, began = self._driver, time.monotonic()
        rows = leaderboard(driver.state.results, driver.state.candidates, driver.metric)
        columns = trial_columns("prefect", driver.metric)
        more = f"; the best {_ROWS} of {len(rows)}" if len(rows) > _ROWS else ""
        with told_if_possible(driver.log):
            table = [{column.name: column.cell(row) for column in columns} for row in rows[:_ROWS]]
            about = f"Best first, by {driver.metric}{more}"
            TableArtifact(key="leaderboard", table=table, description=about, task_run_id=self._search).create()
            most = driver.setup.arguments.max_trials
            percent, about = 100.0 * driver.state.searched / most, f"{most} trials at most"
            if self._bar is None:
                bar = ProgressArtifact(key="progress", progress=percent, description=about, task_run_id=self._search)
                self._bar = cast(Artifact, bar.create()).id
            else:
                update_progress_artifact(self._bar, percent)
        ended = time.monotonic()
        self._next = ended + (ended - began) / _SHARE


# A plan's answer and its tables in Prefect.


@task(name="report plan", cache_policy=NO_CACHE, persist_result=False)
def report_plan(record: PlanRecord, paths: PlanPaths, tracker: Tracker) -> None:
    get_run_logger().info(record.answer)
    command = ["```sh", sent_command(record.best_command, Path(record.model_dir)), "```"] if record.best_command else []
    tables = [line for devices in record.devices for line in _table(devices)]
    lines = [
        f"## {record.answer}",
        "All figures are foreseen: no device has measured them.",
        *tables,
        "",
        *command,
        f"- plan: `{paths.record}`",
        f"- in MLflow: {in_words(tracker.ways)}",
    ]
    with told_if_possible(logging.getLogger(__name__)):
        create_markdown_artifact("\n".join(lines), key="plan", description="The plan, foreseen.")
        link_to_mlflow(tracker.ways, "mlflow-plan", "The plan in MLflow")


def _table(devices: PlannedDevices) -> list[str]:
    head = ["", f"### {devices.label}", "", "| arm | fits | micro-batch | peak | samples/s |", "|---|---|---|---|---|"]
    return [*head, *map(_row_plan, devices.arms), "", *devices.why, fewest_sentence(devices)]


def _row_plan(arm: PlannedArm) -> str:
    rate = "-" if arm.samples_per_s is None else f"{arm.samples_per_s.value:.4g}"
    peak = "-" if arm.peak is None else bytes_shown(arm.peak.value)
    return f"| {arm.label} | {likelihood(arm.fits)} | {arm.micro_batch} x {arm.accumulation} | {peak} | {rate} |"


# Training at full length, with a progress bar and its result in Prefect.

_POLL_S = 0.5
_PROGRESS_PERIOD_S = 5.0


@task(name="train", cache_policy=NO_CACHE, persist_result=False)
def train(full_experiment: FullExperiment) -> TrainingEnd:
    """Waits for the end of a training that has begun, and updates its progress bar meanwhile."""
    get_run_logger().info("logs: %s", full_experiment.paths.root)
    progress = TrainingProgress(full_experiment)
    while (end := full_experiment.wait(_POLL_S)) is None:
        progress.update()
        hear_cancellation(full_experiment.log.warning)
    if end.completed:
        progress.finish()
    else:
        get_run_logger().error("the training failed: %s", end.reason)
    return end


@task(name="report training", cache_policy=NO_CACHE, persist_result=False)
def report_training(full_experiment: FullExperiment) -> None:
    record, paths, ways = full_experiment.record, full_experiment.paths, full_experiment.tracker.ways
    metric = full_experiment.experiment.config.searcher.metric
    lines = [f"## {record.experiment_id}: {record.status.value}"]
    if record.reason:
        lines.append(f"- {record.reason}")
    if record.batches is not None:
        lines.append(f"- batches: {record.batches}")
    if record.best_checkpoint is not None:
        lines.append(f"- best checkpoint: `{paths.checkpoints / record.best_checkpoint}`")
    if record.best_metric is not None:
        lines.append(f"- its {metric}: {record.best_metric:.6g}")
    lines += [f"- folder: `{paths.root}`", f"- in MLflow: {in_words(ways)}"]
    if full_experiment.validation:
        rows = [f"| {name} | {value:.6g} |" for name, value in full_experiment.validation.items()]
        lines += ["", "| last validation | |", "|---|---|", *rows]
    with told_if_possible(full_experiment.log):
        create_markdown_artifact("\n".join(lines), key="full-experiment", description="The result of the training.")
        link_to_mlflow(ways, "mlflow-training", "The full experiment in MLflow")


class TrainingProgress:
    """The progress bar of a training whose length in batches, records or epochs is known."""

    def __init__(self, full_experiment: FullExperiment) -> None:
        self._full_experiment = full_experiment
        self._bar: UUID | None = None
        self._next = 0.0

    def update(self) -> None:
        percent = self._full_experiment.percent
        if percent is not None and time.monotonic() >= self._next:
            self._show(percent)
            self._next = time.monotonic() + _PROGRESS_PERIOD_S

    def finish(self) -> None:
        if self._full_experiment.percent is not None:
            self._show(100.0)

    def _show(self, percent: float) -> None:
        with told_if_possible(self._full_experiment.log):
            if self._bar is None:
                self._bar = create_progress_artifact(percent, key="training", description="The full experiment")
            else:
                update_progress_artifact(self._bar, percent)
