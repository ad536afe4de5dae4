"""Training at full length, with a progress bar and its result in Prefect."""

import time
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from tasks.cancellation import hear_cancellation
from tasks.mlflow_links import in_words, link_to_mlflow
from tasks.telling import told_if_possible
from trial_lib.full_experiment.driver import FullExperiment
from trial_lib.launch.full_training import TrainingEnd

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
    """Shows in Prefect how a full experiment ended, with a link to MLflow."""
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
        """Updates the bar, every few seconds."""
        percent = self._full_experiment.percent
        if percent is not None and time.monotonic() >= self._next:
            self._show(percent)
            self._next = time.monotonic() + _PROGRESS_PERIOD_S

    def finish(self) -> None:
        """Shows that the training has reached its end."""
        if self._full_experiment.percent is not None:
            self._show(100.0)

    def _show(self, percent: float) -> None:
        with told_if_possible(self._full_experiment.log):
            if self._bar is None:
                self._bar = create_progress_artifact(percent, key="training", description="The full experiment")
            else:
                update_progress_artifact(self._bar, percent)
