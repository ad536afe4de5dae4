"""Makes MLflow have a plan as a run of its own, in the experiment of its studies."""

from collections.abc import Iterator
from pathlib import Path

from trial_lib.foresee.plan.answer import fewest_sentence
from trial_lib.foresee.plan.plan_record import ForeseenRange, PlannedArm, PlannedDevices, PlanPaths, PlanRecord
from trial_lib.records.study_folder import work_dir_of
from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.secrets.sent_command import sent_command
from trial_lib.tracking.run_content import (
    DESCRIPTION,
    KIND,
    RECORD_ID,
    STAGE_PARAM,
    RunContent,
    as_params,
    as_points,
    as_tags,
)
from trial_lib.tracking.runs import SENT, Runs
from trial_lib.tracking.sync import files_hash
from trial_lib.tracking.tracking_uri import run_page

PLAN = "plan"
"""The kind of a plan's run."""


class PlanSync:
    """Sends a plan's folder to MLflow, once. It can be sent again unchanged.

    Attributes:
        page: the path of the run's page; None before MLflow has it.
        run_page: the same.
    """

    def __init__(self, paths: PlanPaths, tracking_uri: str) -> None:
        self.page: str | None = None
        self._paths = paths
        self._tracking_uri = tracking_uri

    @property
    def run_page(self) -> str | None:
        """The path of the run's page."""
        return self.page

    def run(self) -> None:
        """Sends the plan.

        Raises:
            Exception: whatever MLflow raises. The part that has arrived stays.
        """
        paths = self._paths
        fingerprint = files_hash([paths.record, *plan_artifacts(paths)])
        record = PlanRecord.model_validate_json(paths.record.read_text())
        wanted = f"tags.{RECORD_ID} = '{record.plan_id}'"
        secrets = KnownSecrets.of(paths.experiment, paths.record)
        runs = Runs(self._tracking_uri, secrets, record.name, wanted, work_dir_of(paths.root), PLAN)
        found = runs.found.get(record.plan_id)
        content = plan_content(record, paths)
        run_id = runs.run_of(content)
        self.page = run_page(runs.experiment_id, run_id)
        if found is None or found.data.tags.get(SENT) != fingerprint:
            runs.send(content)
            runs.mark(run_id, fingerprint)


def plan_artifacts(paths: PlanPaths) -> list[Path]:
    """Returns the files of a plan that go to MLflow."""
    return [paths.record, paths.best_ds_config, paths.report]


def plan_content(record: PlanRecord, paths: PlanPaths) -> RunContent:
    """Returns the run of a plan. The names of its metrics begin with `foreseen`, because nothing was measured."""
    chosen = record.chosen
    best = {} if record.best is None else {"best_devices": record.devices[record.best].label}
    tags = {
        RECORD_ID: record.plan_id,
        KIND: PLAN,
        "finding": record.answer,
        "reason": record.stopped,
        **best,
        **{f"version.{name}": version for name, version in record.versions.items()},
        DESCRIPTION: _description(record),
    }
    params = {
        "model_dir": record.model_dir,
        "on": [devices.label for devices in record.devices],
        "train_batch_size": record.train_batch_size,
        **({} if chosen is None else {"best": chosen.label, STAGE_PARAM: _stage(chosen), **chosen.knobs}),
    }
    metrics = {
        "parameters": float(record.parameters),
        "plan.seconds": record.seconds,
        "plan.peak_memory": float(record.peak_bytes),
        **({} if chosen is None else dict(_metrics("foreseen.best", chosen))),
    }
    for devices in record.devices:
        for arm in devices.arms:
            metrics |= dict(_metrics(f"foreseen.{devices.label.replace(':', ' ')}.{arm.label}", arm))
    return RunContent(
        record_id=record.plan_id,
        name=record.plan_id,
        status="FAILED" if record.stopped else "FINISHED",
        started_at=record.started_at,
        ended_at=record.started_at + record.seconds,
        tags=as_tags(tags),
        params=as_params(params),
        metrics=as_points(metrics),
        artifacts=[file for file in plan_artifacts(paths) if file.exists()],
    )


def _stage(arm: PlannedArm) -> int:
    stage: int = arm.ds_config.get("zero_optimization", {}).get("stage", 0)
    return stage


def _metrics(prefix: str, arm: PlannedArm) -> Iterator[tuple[str, float]]:
    """Yields an arm's figures: shares, samples, bytes, samples and tokens a second."""
    yield f"{prefix}.fits", arm.fits
    yield f"{prefix}.largest_micro_batch", float(arm.largest_micro_batch)
    ranges: dict[str, ForeseenRange | None] = {
        "samples_per_s": arm.samples_per_s,
        "tokens_per_s": arm.tokens_per_s,
        "mfu": arm.mfu,
        "cost_per_billion_tokens": arm.cost,
        "peak_memory": arm.peak,
    }
    for name, figure in ranges.items():
        if figure is not None:
            yield f"{prefix}.{name}", figure.value


def _description(record: PlanRecord) -> str:
    lines = [f"**{record.answer or record.stopped}**"]
    lines += [_of_devices(devices) for devices in record.devices]
    if record.best_command:
        command = sent_command(record.best_command, Path(record.model_dir))
        lines.append(f"**To start there** (`best_ds_config.json`):\n\n```sh\n{command}\n```")
    lines.append(f"A plan for **{record.name}**. All figures are foreseen; no device has measured them.")
    return "\n\n".join(lines)


def _of_devices(devices: PlannedDevices) -> str:
    sentences = [devices.answer, *devices.why, fewest_sentence(devices)]
    return "\n".join(
        [f"**{devices.label}**", "", *(f"- {sentence}" for sentence in dict.fromkeys(sentences) if sentence)]
    )
