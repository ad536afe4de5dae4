"""The folders of studies and full experiments: their files, and the records in them."""

import difflib
import os
import platform
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import Field, field_validator

from zerotune.trial_lib.records.candidate import FrozenRecord, Seconds
from zerotune.trial_lib.records.result import SEARCH_METRICS


class Whereabouts(FrozenRecord):
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


class PathBelow:
    """An attribute of a class of files: the path of one of them, by its name below the `root`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, owner: type | None = None) -> Path:
        below: Path = folder.root / self._name
        return below


@dataclass(frozen=True)
class TrialPaths:
    root: Path

    candidate = PathBelow("candidate.json")  # the candidate that ran (`Candidate` as JSON)
    ds_config = PathBelow("ds_config.json")  # the complete DeepSpeed configuration that the trial ran with
    training_spec = PathBelow("training.json")  # the orders to ranks of a trial class or the Core API (`TrainingSpec`)
    tensorboard = PathBelow("tensorboard")  # TensorBoard's files of a trial class
    result = PathBelow("result.json")  # how the trial ended (`TrialResult` as JSON)
    hostfile = PathBelow("hostfile")  # the hosts of a trial that spans several, as DeepSpeed's launcher reads them
    launch = PathBelow("launch.json")  # the orders to the ranks of such a trial, by rank (JSON)
    withdrawal = PathBelow("withdrawal.json")  # why its ranks measured no further size, if they decided that
    waiting = PathBelow("waiting.json")  # what the trial waits for, while it waits for slots (JSON)
    scratch = PathBelow("scratch")  # what the program would have written among the user's files; while it runs

    def log(self, rank: int) -> Path:
        """Standard output and error together."""
        return self.root / f"rank{rank}.log"

    def measurement(self, rank: int) -> Path:
        """It exists only if the rank measured enough."""
        return self.root / f"rank{rank}.measurement.json"

    def failure(self, rank: int) -> Path:
        return self.root / f"rank{rank}.failure.json"

    def engine_built(self, rank: int) -> Path:
        """What a rank knows about the program once it has a DeepSpeed engine. It does not exist before."""
        return self.root / f"rank{rank}.engine"

    @property
    def as_typed(self) -> "TrialPaths":
        """The run of the program as typed, with which a profile trial begins."""
        return TrialPaths(self.root / "as_typed")

    @property
    def own(self) -> "TrialPaths":
        """What the run of the program as typed has measured of the user's configuration."""
        return TrialPaths(self.root / "own")

    @property
    def larger(self) -> "TrialPaths":
        """The beginning of a program typed at a micro-batch of 1 at a larger one."""
        return TrialPaths(self.root / "larger")

    def run_of(self, log: str) -> "TrialPaths":
        """Returns the run that wrote a log. A profile trial may have ended with the program as typed."""
        return self.as_typed if Path(log).parent.name == self.as_typed.root.name else self

    def state(self, rank: int) -> Path:
        """The activity of a rank that has not advanced for long, for the other ranks and the driver."""
        return self.scratch / f"rank{rank}.state.json"


@dataclass(frozen=True)
class ExperimentFolder:
    """The files that the folders of a study, a full experiment and a plan have in common."""

    root: Path

    experiment = PathBelow("experiment.yaml")  # the experiment's YAML as submitted


@dataclass(frozen=True)
class AnswerFolder(ExperimentFolder):
    """The files with the answer of a study, or of a plan."""

    best_ds_config = PathBelow("best_ds_config.json")  # of the answer, as DeepSpeed reads it
    best_command = PathBelow("best_command.txt")  # the command to train with it
    best_accelerate_config = PathBelow("best_accelerate_config.yaml")  # if the user's would contradict the answer
    report = PathBelow("report.html")  # the page for people, in one self-contained file


@dataclass(frozen=True)
class DrivenFolder(ExperimentFolder):
    """The files that a study's folder and a full experiment's have in common."""

    record: ClassVar[PathBelow]  # the own record (`StudyRecord` or `FullExperimentRecord` as JSON)
    log: ClassVar[PathBelow]  # the events, line by line, for people
    lock = PathBelow("driver.lock")  # the lock of the one process that drives the study or the full experiment
    wrapper = PathBelow("wrapper.json")  # the words of a command that starts the tuned one (`TypedWrapper`), if any


@dataclass(frozen=True)
class StudyPaths(DrivenFolder, AnswerFolder):
    record = PathBelow("study.json")
    history = PathBelow("history.jsonl")  # one JSON line for each ask, tell and stop, in order
    log = PathBelow("study.log")
    fork_server_log = PathBelow("fork_server.log")  # the output of the fork server
    profile = PathBelow("profile.json")  # the profile trial's findings, and each arm's needs (`EstimateReport`)
    fingerprint = PathBelow("fingerprint.json")  # the experiment when the study opened (`Fingerprint`)
    foreseen = PathBelow("foreseen.json")  # the arms foreseen before the search (`ForeseenArm`s)
    plan = PathBelow("plan")  # the plan that the study began with: its record and its runs (`PlanPaths`)
    planned_trials = PathBelow("planned_trials.json")  # what the plan foresaw for ended trials (`PlannedTrial`s)
    earlier_studies = PathBelow("earlier_studies.json")  # results it learned from (`EarlierStudy`s)
    best_experiment = PathBelow("best_experiment.yaml")  # with the winner's switches, if it has any
    best = PathBelow("best")  # copies of the user's files with the answer's values, which the best command names
    own_command = PathBelow("best/own_command.json")  # the edits of these files (`OwnCommand`)
    best_ds_metrics = PathBelow("best_ds_metrics.json")  # the winner's measurement, and its gain
    figures = PathBelow("figures")  # the report's figures, a page each

    @property
    def full_experiment(self) -> TrialPaths:
        return TrialPaths(self.root / "full_experiment")

    trials = PathBelow("trials")  # one folder for each trial

    def trial(self, number: int) -> TrialPaths:
        return TrialPaths(self.trials / f"{number:04d}")


class FileChange(FrozenRecord):
    """A file of the user's, and what the answer makes of it."""

    path: str  # absolute
    before: str | None  # its text; None if there is no such file
    after: str

    def diff(self, folder: Path) -> str:
        """A unified diff without context, whose paths begin at a folder."""
        name = shown_in(Path(self.path), folder)
        texts = (self.before or "").splitlines(), self.after.splitlines()
        return "\n".join(difflib.unified_diff(*texts, name if self.before else "/dev/null", name, n=0, lineterm=""))


class OwnCommand(FrozenRecord):
    """The command that the user typed, with the answer's values, by edited copies of the files that it names."""

    folder: str  # where it was typed
    words: tuple[str, ...]  # of the command, with the copies' paths
    variables: dict[str, str] = Field(default_factory=dict)  # to set before it
    copies: dict[str, str] = Field(default_factory=dict)  # the texts of the copies, by their paths
    changes: tuple[FileChange, ...] = ()  # the same edits in the user's own files
    applied: tuple[str, ...] = ()  # the words with these files

    @property
    def diff(self) -> str:
        """The edits of the user's files. Empty if the command's words have all of it."""
        return "\n".join(change.diff(Path(self.folder)) for change in self.changes)

    @classmethod
    def of(cls, paths: StudyPaths) -> "OwnCommand | None":
        """None if the study's answer is no command of the user's, or its record is damaged."""
        try:
            return cls.model_validate_json(paths.own_command.read_text())
        except (OSError, ValueError):
            return None


def shown_in(path: Path, folder: Path) -> str:
    """Returns a path as one types it in a folder."""
    return os.path.relpath(path, folder) if path.is_relative_to(folder) else str(path)


class StudyStatus(str, Enum):
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


def work_dir_of(root: Path) -> Path:
    """Returns the folder of the MLflow store that belongs to the folder of a study, a full experiment or a plan. The
    store is in the folder where the command ran. If you moved the study's folder, it is the folder that it is in now.
    """
    parent = root.absolute().parent
    return parent.parent if parent.name in OWN_FOLDERS else parent


class RunRecord(FrozenRecord):
    """What the records of a study and of a full experiment have in common. It is written anew whenever it changes."""

    kind: ClassVar[str]  # `study` or `full experiment`, for messages
    folders: ClassVar[str]  # the folder of all of this kind, in that where a command runs
    id_field: ClassVar[str]  # the field with the id, which is unique on this and other machines

    name: str  # the experiment's name; studies of one experiment share it
    arguments: dict[str, Any] = Field(default_factory=dict)  # of the command or the flow, as JSON
    model_dir: str = ""  # the model directory, absolute
    ds_config: dict[str, Any] = Field(default_factory=dict)  # the user's DeepSpeed configuration, or that of a training
    status: StudyStatus = StudyStatus.RUNNING
    reason: str = ""  # why it failed or stopped. Empty otherwise.
    started_at: Seconds = 0.0  # seconds since the epoch
    ended_at: Seconds | None = None  # seconds since the epoch
    flow_run_id: str | None = None  # the Prefect flow run that began it and resumes it; None for a command's
    whereabouts: Whereabouts | None = None  # when it was last opened, by which a copy is recognised
    git_commit: str = ""  # of the model directory when it began. Empty if that is in no repository.
    user: str = ""  # who began it

    @property
    def id(self) -> str:
        own: str = getattr(self, self.id_field)
        return own


DOCUMENT_VERSION: Final = 1  # of the JSON documents of studies and plans, which `zerotune/*.schema.json` describe


class StudyRecord(RunRecord):
    kind = "study"
    folders = STUDIES
    id_field = "study_id"

    study_id: str
    method: str  # the name of the search method
    metric: str  # the metric that the search optimises
    switches: dict[str, Any] = Field(default_factory=dict)  # values of the program's switches as typed, by place
    layouts: dict[str, str] = Field(default_factory=dict)  # kinds of switches that are layouts, by place
    best_number: int | None = None  # the winning trial
    # How many times better than the user's configuration the winner is: 1.5 is half as fast again. None if that did not
    # complete.
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None  # its confidence interval; None if not confirmed
    finding: str = ""  # the answer in one line. Empty if the study has none.
    # One sentence on how far the winner's throughput is below the last known one, and on the changes since. Empty if it
    # is not below, beyond the noise.
    regression: str = ""

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
    ds_config = PathBelow("ds_config.json")  # the user's configuration with another one merged in
    training_spec = PathBelow("training.json")  # the orders to the ranks (`TrainingSpec` as JSON)
    record = PathBelow("record.json")
    metrics = PathBelow("metrics.jsonl")  # of a trial class or of the Core API, one JSON line each
    system_metrics = PathBelow("system_metrics.jsonl")  # the host's load, one JSON line a sample
    finished = PathBelow("finished.json")  # the record of the end of the training, by a trial class or the Core API
    checkpoints = PathBelow("checkpoints")  # the checkpoints of a trial class or the Core API, a folder each
    tensorboard = PathBelow("tensorboard")  # TensorBoard's files of a trial class
    scratch = PathBelow("scratch")  # files that the ranks need only while they run
    stop = PathBelow("stop")  # the folder of the request to save and stop (`StopRequest`)
    log = PathBelow("train.log")

    def rank_log(self, rank: int) -> Path:
        """Standard output and error together, one attempt after the other."""
        return self.root / f"rank{rank}.log"

    def rank_finished(self, rank: int) -> Path:
        """Written by a rank whose program has returned."""
        return self.root / f"rank{rank}.finished.json"

    def rank_failure(self, rank: int) -> Path:
        """The exception that ended a rank in the last attempt, if one did."""
        return self.root / f"rank{rank}.failure.json"


class FullExperimentRecord(RunRecord):
    """A full experiment's own record. A study's has no flow run of its own."""

    kind = "full experiment"
    folders = FULL_EXPERIMENTS
    id_field = "experiment_id"

    experiment_id: str
    study_id: str | None = None  # the study whose winner it trains with. None if it belongs to no study.
    hparams: dict[str, Any] = Field(default_factory=dict)  # without the DeepSpeed configuration
    attempts: int = 0  # how often the training was started, over all resumes
    batches: int | None = None  # optimizer steps done, as far as the training reports them
    best_checkpoint: str | None = None  # the name of the best checkpoint so far
    best_metric: float | None = None  # the validation metric of that checkpoint

    def of_study(self, study_id: str) -> "FullExperimentRecord":
        return self.model_copy(update={"experiment_id": full_experiment_id(study_id), "study_id": study_id})


def full_experiment_id(study_id: str) -> str:
    return f"{study_id}-full-experiment"
