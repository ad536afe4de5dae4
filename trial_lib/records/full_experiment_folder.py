"""The files of a full experiment, and its record. No other module names these files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.study_folder import DrivenFolder, StudyStatus
from trial_lib.records.whereabouts import Whereabouts


@dataclass(frozen=True)
class FullExperimentPaths(DrivenFolder):
    """The files of one full experiment."""

    @property
    def ds_config(self) -> Path:
        """The DeepSpeed configuration that it trains with: the user's configuration with another one merged in."""
        return self.root / "ds_config.json"

    @property
    def training_spec(self) -> Path:
        """The orders to the ranks (`TrainingSpec` as JSON)."""
        return self.root / "training.json"

    @property
    def record(self) -> Path:
        """The full experiment's own record (`FullExperimentRecord` as JSON)."""
        return self.root / "record.json"

    @property
    def metrics(self) -> Path:
        """The metrics of a trial class or of the Core API while it trains, one JSON line each (see `metrics_file`)."""
        return self.root / "metrics.jsonl"

    @property
    def system_metrics(self) -> Path:
        """The load of the host during the training, one JSON line a sample."""
        return self.root / "system_metrics.jsonl"

    @property
    def finished(self) -> Path:
        """The record of the end of the training, by a trial class or the Core API."""
        return self.root / "finished.json"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints of a trial class or the Core API, a folder each."""
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's files of a trial class."""
        return self.root / "tensorboard"

    @property
    def scratch(self) -> Path:
        """Files that the ranks need only while they run."""
        return self.root / "scratch"

    @property
    def stop(self) -> Path:
        """The folder of the request to save and stop (`StopRequest`)."""
        return self.root / "stop"

    @property
    def log(self) -> Path:
        """The events of the training, line by line, for people."""
        return self.root / "train.log"

    def rank_log(self, rank: int) -> Path:
        """The output of a rank, standard output and error together, one attempt after the other."""
        return self.root / f"rank{rank}.log"

    def rank_finished(self, rank: int) -> Path:
        """Written by a rank whose program has returned."""
        return self.root / f"rank{rank}.finished.json"

    def rank_failure(self, rank: int) -> Path:
        """The exception that ended a rank in the last attempt, if one did."""
        return self.root / f"rank{rank}.failure.json"


class FullExperimentRecord(FrozenRecord):
    """A full experiment's own record, written anew whenever it changes.

    Attributes:
        experiment_id: unique on this and other machines.
        name: the experiment's name.
        study_id: the study whose winner it trains with. None if it belongs to no study.
        model_dir: the model directory, absolute.
        ds_config: the DeepSpeed configuration that it trains with.
        hparams: the experiment's hyperparameters, without the DeepSpeed configuration.
        arguments: of the command or the flow, as JSON. A resumed full experiment takes them from here.
        status: its state.
        reason: why it failed or stopped. Empty otherwise.
        attempts: how often the training was started, over all resumes.
        started_at: seconds since the epoch.
        ended_at: seconds since the epoch.
        batches: optimizer steps done, as far as the training reports them.
        best_checkpoint: the name of the best checkpoint so far.
        best_metric: the validation metric of that checkpoint.
        flow_run_id: the Prefect flow run that began it, and resumes it when retried. None for a command's, and for a
            study's.
        whereabouts: the place of its folder when it was last opened, by which a copy is recognised.
    """

    experiment_id: str
    name: str
    study_id: str | None = None
    model_dir: str = ""
    ds_config: dict[str, Any] = Field(default_factory=dict)
    hparams: dict[str, Any] = Field(default_factory=dict)
    arguments: dict[str, Any] = Field(default_factory=dict)
    status: StudyStatus = StudyStatus.RUNNING
    reason: str = ""
    attempts: int = 0
    started_at: float = 0.0
    ended_at: float | None = None
    batches: int | None = None
    best_checkpoint: str | None = None
    best_metric: float | None = None
    flow_run_id: str | None = None
    whereabouts: Whereabouts | None = None

    def of_study(self, study_id: str) -> "FullExperimentRecord":
        """Returns the record as that of a study's full experiment."""
        return self.model_copy(update={"experiment_id": full_experiment_id(study_id), "study_id": study_id})


def full_experiment_id(study_id: str) -> str:
    """Returns the id of a study's full experiment."""
    return f"{study_id}-full-experiment"
