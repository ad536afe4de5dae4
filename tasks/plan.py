"""A plan's answer and its tables in Prefect."""

import logging
from pathlib import Path

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks.mlflow_links import in_words, link_to_mlflow
from tasks.telling import told_if_possible
from trial_lib.foresee.plan.answer import fewest_sentence, likelihood
from trial_lib.foresee.plan.plan_record import PlannedArm, PlannedDevices, PlanPaths, PlanRecord
from trial_lib.records.units import bytes_shown
from trial_lib.secrets.sent_command import sent_command
from trial_lib.tracking.tracker import Tracker

_LOG = logging.getLogger(__name__)


@task(name="report plan", cache_policy=NO_CACHE, persist_result=False)
def report_plan(record: PlanRecord, paths: PlanPaths, tracker: Tracker) -> None:
    """Shows a plan in Prefect, with a link to MLflow."""
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
    with told_if_possible(_LOG):
        create_markdown_artifact("\n".join(lines), key="plan", description="The plan, foreseen.")
        link_to_mlflow(tracker.ways, "mlflow-plan", "The plan in MLflow")


def _table(devices: PlannedDevices) -> list[str]:
    head = ["", f"### {devices.label}", "", "| arm | fits | micro-batch | peak | samples/s |", "|---|---|---|---|---|"]
    return [*head, *map(_row, devices.arms), "", *devices.why, fewest_sentence(devices)]


def _row(arm: PlannedArm) -> str:
    rate = "-" if arm.samples_per_s is None else f"{arm.samples_per_s.value:.4g}"
    peak = "-" if arm.peak is None else bytes_shown(arm.peak.value)
    return f"| {arm.label} | {likelihood(arm.fits)} | {arm.micro_batch} x {arm.accumulation} | {peak} | {rate} |"
