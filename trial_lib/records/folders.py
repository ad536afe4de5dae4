"""The folders of studies and full experiments: their files, and the records in them."""

import platform
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from trial_lib.records.candidate import FrozenRecord, Seconds
from trial_lib.records.result import SEARCH_METRICS


class Whereabouts(FrozenRecord):
    """The place of a folder."""

    host: str  # the host's name
    path: str  # of the folder, without links
    inode: int  # the folder's number on its file system. A folder that is moved there keeps it; a copy gets another.


def whereabouts_of(root: Path) -> Whereabouts:
    """Returns the present place of a folder."""
    folder = root.resolve()
    return Whereabouts(host=platform.node(), path=str(folder), inode=folder.stat().st_ino)


# The files of a study and of its trials, and the study's record. No other module names these files.

STUDIES, FULL_EXPERIMENTS, PLANS = "zerotune-studies", "zerotune-experiments", "zerotune-plans"
"""The folders, in that where a command runs, which have one for each study, each full experiment and each plan."""

OWN_FOLDERS = (STUDIES, FULL_EXPERIMENTS, PLANS)

STORE, ARTIFACTS = "mlflow.db", "mlartifacts"
"""The MLflow store beside them, if no other store is named, and its files."""


@dataclass(frozen=True)
class TrialPaths:
    """The files of one trial."""

    root: Path

    @property
    def candidate(self) -> Path:
        """The candidate that ran (`Candidate` as JSON)."""
        return self.root / "candidate.json"

    @property
    def ds_config(self) -> Path:
        """The complete DeepSpeed configuration that the trial ran with."""
        return self.root / "ds_config.json"

    @property
    def training_spec(self) -> Path:
        """The orders to the ranks of a trial class, or of a script with the Core API (`TrainingSpec` as JSON)."""
        return self.root / "training.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's files of a trial class."""
        return self.root / "tensorboard"

    @property
    def result(self) -> Path:
        """How the trial ended (`TrialResult` as JSON)."""
        return self.root / "result.json"

    def log(self, rank: int) -> Path:
        """The output of a rank, standard output and error together."""
        return self.root / f"rank{rank}.log"

    def measurement(self, rank: int) -> Path:
        """The measurement of a rank. It exists only if the rank measured enough."""
        return self.root / f"rank{rank}.measurement.json"

    def failure(self, rank: int) -> Path:
        """The exception that ended a rank, if one did."""
        return self.root / f"rank{rank}.failure.json"

    def engine_built(self, rank: int) -> Path:
        """The facts that a rank knows about the program once it has a DeepSpeed engine. It does not exist before."""
        return self.root / f"rank{rank}.engine"

    @property
    def as_typed(self) -> "TrialPaths":
        """The run of the program as typed, with which a profile trial begins."""
        return TrialPaths(self.root / "as_typed")

    @property
    def own(self) -> "TrialPaths":
        """What the run of the program as typed has measured of the user's configuration."""
        return TrialPaths(self.root / "own")

    def run_of(self, log: str) -> "TrialPaths":
        """Returns the run that wrote a log. A profile trial may have ended with the program as typed."""
        return self.as_typed if Path(log).parent.name == self.as_typed.root.name else self

    @property
    def hostfile(self) -> Path:
        """The hosts of a trial that spans several, as DeepSpeed's launcher reads them."""
        return self.root / "hostfile"

    @property
    def launch(self) -> Path:
        """The orders to the ranks of such a trial, by rank (JSON)."""
        return self.root / "launch.json"

    @property
    def withdrawal(self) -> Path:
        """Why the ranks that began with this trial measured no further micro-batch size, if they decided that."""
        return self.root / "withdrawal.json"

    @property
    def waiting(self) -> Path:
        """What the trial waits for (JSON). It exists only while the trial waits for slots."""
        return self.root / "waiting.json"

    @property
    def scratch(self) -> Path:
        """Files that the program would have written among the user's. The folder exists only while the trial runs."""
        return self.root / "scratch"

    def state(self, rank: int) -> Path:
        """The activity of a rank that has not advanced for long, for the other ranks and the driver."""
        return self.scratch / f"rank{rank}.state.json"


@dataclass(frozen=True)
class ExperimentFolder:
    """The files that the folders of a study, a full experiment and a plan have in common."""

    root: Path

    @property
    def experiment(self) -> Path:
        """The experiment's YAML as submitted."""
        return self.root / "experiment.yaml"


@dataclass(frozen=True)
class AnswerFolder(ExperimentFolder):
    """The files with the answer of a study, or of a plan."""

    @property
    def best_ds_config(self) -> Path:
        """The DeepSpeed configuration of the answer, as DeepSpeed reads it."""
        return self.root / "best_ds_config.json"

    @property
    def best_command(self) -> Path:
        """The command to train with it."""
        return self.root / "best_command.txt"

    @property
    def best_accelerate_config(self) -> Path:
        """Accelerate's configuration file for the answer, if the user's would contradict it."""
        return self.root / "best_accelerate_config.yaml"

    @property
    def report(self) -> Path:
        """The page for people, in one self-contained file."""
        return self.root / "report.html"


@dataclass(frozen=True)
class DrivenFolder(ExperimentFolder):
    """The files that a study's folder and a full experiment's have in common."""

    @property
    def lock(self) -> Path:
        """The lock of the one process that drives the study or the full experiment."""
        return self.root / "driver.lock"

    @property
    def wrapper(self) -> Path:
        """The words of a typed command that starts the tuned one (`TypedWrapper` as JSON). Not there if none does."""
        return self.root / "wrapper.json"


@dataclass(frozen=True)
class StudyPaths(DrivenFolder, AnswerFolder):
    """The files of one study."""

    @property
    def record(self) -> Path:
        """The study's own record (`StudyRecord` as JSON)."""
        return self.root / "study.json"

    @property
    def history(self) -> Path:
        """One JSON line for each ask, tell and stop, in order."""
        return self.root / "history.jsonl"

    @property
    def log(self) -> Path:
        """The events of the study, line by line, for people."""
        return self.root / "study.log"

    @property
    def fork_server_log(self) -> Path:
        """The output of the fork server."""
        return self.root / "fork_server.log"

    @property
    def profile(self) -> Path:
        """The findings of the profile trial, and the needs of each ZeRO stage (`StageEstimate`s)."""
        return self.root / "profile.json"

    @property
    def fingerprint(self) -> Path:
        """The state of the experiment when the study opened (`Fingerprint` as JSON), for later studies to compare."""
        return self.root / "fingerprint.json"

    @property
    def foreseen(self) -> Path:
        """The arms that were foreseen before the search (`ForeseenArm` as JSON). The search begins with them."""
        return self.root / "foreseen.json"

    @property
    def foreseen_runs(self) -> Path:
        """The operations of the arms' foreseen runs, if the devices are known ones. Its trials show their speed."""
        return self.root / "foreseen_runs"

    @property
    def plan(self) -> Path:
        """The plan that the study began with: its record and its runs (`PlanPaths`)."""
        return self.root / "plan"

    @property
    def planned_trials(self) -> Path:
        """What the plan foresaw for each trial that has ended (`PlannedTrial`s by number, as JSON)."""
        return self.root / "planned_trials.json"

    @property
    def device_speed(self) -> Path:
        """What its trials have shown of the devices' speed (`DeviceSpeed` as JSON), for later plans and studies."""
        return self.root / "device_speed.json"

    @property
    def earlier_studies(self) -> Path:
        """The results of earlier studies that this one learned from, as of its opening (`EarlierStudy`s, as JSON)."""
        return self.root / "earlier_studies.json"

    @property
    def best_experiment(self) -> Path:
        """The experiment with the winner's switches in its command. It exists only if the program has switches."""
        return self.root / "best_experiment.yaml"

    @property
    def best_ds_metrics(self) -> Path:
        """The winner's measurement, and its gain over the user's configuration."""
        return self.root / "best_ds_metrics.json"

    @property
    def figures(self) -> Path:
        """The report's figures, a page each."""
        return self.root / "figures"

    @property
    def full_experiment(self) -> TrialPaths:
        """The training at full length with the winner."""
        return TrialPaths(self.root / "full_experiment")

    @property
    def trials(self) -> Path:
        """One folder for each trial."""
        return self.root / "trials"

    def trial(self, number: int) -> TrialPaths:
        """The files of one trial."""
        return TrialPaths(self.trials / f"{number:04d}")


class StudyStatus(str, Enum):
    """The state of a study."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


def work_dir_of(root: Path) -> Path:
    """Returns the folder of the MLflow store that belongs to the folder of a study, a full experiment or a plan.

    The store is in the folder where the command ran. If you moved the study's folder, it is the folder that it is in
    now.
    """
    parent = root.absolute().parent
    return parent.parent if parent.name in OWN_FOLDERS else parent


class StudyRecord(FrozenRecord):
    """A study's own record, written anew whenever it changes."""

    study_id: str  # unique on this and other machines
    name: str  # the experiment's name; studies of one experiment share it
    method: str  # the name of the search method
    metric: str  # the metric that the search optimises
    # Of the search and the flow, as JSON. A resumed study takes them from here.
    arguments: dict[str, Any] = Field(default_factory=dict)
    model_dir: str = ""  # the model directory, absolute
    ds_config: dict[str, Any] = Field(default_factory=dict)  # the user's DeepSpeed configuration
    # The values of the program's switches in the command as typed, by their places
    switches: dict[str, Any] = Field(default_factory=dict)
    # The kinds of those switches that are layouts, by their places
    layouts: dict[str, str] = Field(default_factory=dict)
    status: StudyStatus = StudyStatus.RUNNING  # the state of the study
    reason: str = ""  # why it failed or stopped. Empty otherwise.
    best_number: int | None = None  # the winning trial
    # How many times better than the user's configuration the winner is: 1.5 is half as fast again. None if that did not
    # complete.
    gain: float | None = None
    # The ends of the gain's confidence interval. None if it was not confirmed.
    gain_interval: tuple[float, float] | None = None
    finding: str = ""  # the answer in one line. Empty if the study has none.
    # One sentence on how far the winner's throughput is below the last known one, and on the changes since. Empty if it
    # is not below, beyond the noise.
    regression: str = ""
    started_at: Seconds = 0.0  # seconds since the epoch
    ended_at: Seconds | None = None  # seconds since the epoch
    # The Prefect flow run that began it, and resumes it when retried. None for a command's.
    flow_run_id: str | None = None
    # The place of its folder when it was last opened, by which a copy is recognised
    whereabouts: Whereabouts | None = None

    @field_validator("arguments")
    @classmethod
    def _has_command_and_settings(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        command, settings = arguments.get("command") or [], arguments.get("settings") or {}
        if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
            raise ValueError("no command")
        if not isinstance(settings, dict):
            raise ValueError("no settings of a search")
        return arguments

    @field_validator("metric")
    @classmethod
    def _is_metric(cls, metric: str) -> str:
        if metric not in SEARCH_METRICS:
            raise ValueError("no metric of a search")
        return metric


# The files of a full experiment, and its record. No other module names these files.


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
    """A full experiment's own record, written anew whenever it changes."""

    experiment_id: str  # unique on this and other machines
    name: str  # the experiment's name
    study_id: str | None = None  # the study whose winner it trains with. None if it belongs to no study.
    model_dir: str = ""  # the model directory, absolute
    ds_config: dict[str, Any] = Field(default_factory=dict)  # the DeepSpeed configuration that it trains with
    # The experiment's hyperparameters, without the DeepSpeed configuration
    hparams: dict[str, Any] = Field(default_factory=dict)
    # Of the command or the flow, as JSON. A resumed full experiment takes them from here.
    arguments: dict[str, Any] = Field(default_factory=dict)
    status: StudyStatus = StudyStatus.RUNNING  # its state
    reason: str = ""  # why it failed or stopped. Empty otherwise.
    attempts: int = 0  # how often the training was started, over all resumes
    started_at: float = 0.0  # seconds since the epoch
    ended_at: float | None = None  # seconds since the epoch
    batches: int | None = None  # optimizer steps done, as far as the training reports them
    best_checkpoint: str | None = None  # the name of the best checkpoint so far
    best_metric: float | None = None  # the validation metric of that checkpoint
    # The Prefect flow run that began it, and resumes it when retried. None for a command's, and for a study's.
    flow_run_id: str | None = None
    # The place of its folder when it was last opened, by which a copy is recognised
    whereabouts: Whereabouts | None = None

    def of_study(self, study_id: str) -> "FullExperimentRecord":
        """Returns the record as that of a study's full experiment."""
        return self.model_copy(update={"experiment_id": full_experiment_id(study_id), "study_id": study_id})


def full_experiment_id(study_id: str) -> str:
    """Returns the id of a study's full experiment."""
    return f"{study_id}-full-experiment"
