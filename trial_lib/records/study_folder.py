"""A study's folder and its record: the one place that names a study's files."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.whereabouts import Whereabouts

STUDIES, FULL_EXPERIMENTS = "zerotune-studies", "zerotune-experiments"
"""The folders, in that where a command runs, which have one for each study and each full experiment."""


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
        """What the ranks of a trial class, or a script by the Core API, were told (`TrainingSpec` as JSON)."""
        return self.root / "training.json"

    @property
    def tensorboard(self) -> Path:
        """What a trial class wrote for TensorBoard."""
        return self.root / "tensorboard"

    @property
    def result(self) -> Path:
        """How the trial ended (`TrialResult` as JSON)."""
        return self.root / "result.json"

    def log(self, rank: int) -> Path:
        """What a rank printed, standard output and error together."""
        return self.root / f"rank{rank}.log"

    def measurement(self, rank: int) -> Path:
        """What a rank measured; it exists only when the rank had what it needed."""
        return self.root / f"rank{rank}.measurement.json"

    def failure(self, rank: int) -> Path:
        """The exception that ended a rank, if one did."""
        return self.root / f"rank{rank}.failure.json"

    def engine_built(self, rank: int) -> Path:
        """What is known of the program by the time that a rank has a DeepSpeed engine; not there before."""
        return self.root / f"rank{rank}.engine"

    @property
    def as_typed(self) -> "TrialPaths":
        """The run of the program as it was typed that a profile trial begins with."""
        return TrialPaths(self.root / "as_typed")

    def run_of(self, log: str) -> "TrialPaths":
        """Returns the run that has left a log: a profile trial may have ended with the program's as it was typed."""
        return self.as_typed if Path(log).parent.name == self.as_typed.root.name else self

    @property
    def hostfile(self) -> Path:
        """The hosts of a trial that spans several, as DeepSpeed's launcher reads them."""
        return self.root / "hostfile"

    @property
    def launch(self) -> Path:
        """What the ranks of such a trial are told, by rank (JSON)."""
        return self.root / "launch.json"

    @property
    def withdrawal(self) -> Path:
        """Why the ranks that began with this trial measured no further micro-batch size, where they decided it."""
        return self.root / "withdrawal.json"

    @property
    def scratch(self) -> Path:
        """What the program would have written into the user's files; there only while the trial runs."""
        return self.root / "scratch"

    def state(self, rank: int) -> Path:
        """What a rank that has stood still for long does, for the other ranks and the driver; there only meanwhile."""
        return self.scratch / f"rank{rank}.state.json"


@dataclass(frozen=True)
class StudyPaths:
    """The files of one study."""

    root: Path

    @property
    def experiment(self) -> Path:
        """The experiment's YAML as submitted."""
        return self.root / "experiment.yaml"

    @property
    def shown_experiment(self) -> Path:
        """The experiment's YAML without the values that look like secrets: what others are shown."""
        return self.root / "experiment.redacted.yaml"

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
        """What happened, line by line, for people."""
        return self.root / "study.log"

    @property
    def fork_server_log(self) -> Path:
        """What the fork server printed."""
        return self.root / "fork_server.log"

    @property
    def profile(self) -> Path:
        """What the profile trial found out, and what each ZeRO stage would need (`StageEstimate`s)."""
        return self.root / "profile.json"

    @property
    def fingerprint(self) -> Path:
        """What the experiment was when the study opened (`Fingerprint` as JSON), for later studies to compare with."""
        return self.root / "fingerprint.json"

    @property
    def earlier_studies(self) -> Path:
        """What a study that learns found of earlier ones when it opened (a list of `EarlierStudy`, as JSON)."""
        return self.root / "earlier_studies.json"

    @property
    def lock(self) -> Path:
        """Held by the one process that drives the study."""
        return self.root / "driver.lock"

    @property
    def best_ds_config(self) -> Path:
        """The winning DeepSpeed configuration, as DeepSpeed reads it."""
        return self.root / "best_ds_config.json"

    @property
    def best_accelerate_config(self) -> Path:
        """Accelerate's configuration file for the winner, where the user's own would contradict it."""
        return self.root / "best_accelerate_config.yaml"

    @property
    def best_ds_metrics(self) -> Path:
        """What the winner measured, and its gain over the user's configuration."""
        return self.root / "best_ds_metrics.json"

    @property
    def best_command(self) -> Path:
        """What to type to train with the winner."""
        return self.root / "best_command.txt"

    @property
    def report(self) -> Path:
        """The study as a page for people: one file that needs nothing else."""
        return self.root / "report.html"

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
    """Where a study stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


def work_dir_of(root: Path) -> Path:
    """Returns the folder that the MLflow store of a study's, or of a full experiment's, folder stands in.

    That is where the command ran that made it; of one that somebody has put elsewhere, the folder that it is in now.
    """
    parent = root.absolute().parent
    return parent.parent if parent.name in (STUDIES, FULL_EXPERIMENTS) else parent


class StudyRecord(FrozenRecord):
    """A study's own record, written anew whenever it changes.

    Attributes:
        study_id: unique on this and other machines.
        name: the experiment's name; studies of one experiment share it.
        method: the search (`asha`, `binary`, `random`, `micro_batch`).
        metric: what is optimised.
        arguments: of the search and the flow, as JSON: a resumed study takes them from here.
        model_dir: the model directory, absolute.
        ds_config: the user's DeepSpeed configuration.
        status: where the study stands.
        reason: why it failed or stopped; empty otherwise.
        best_number: the winning trial.
        gain: how many times better than the user's configuration the winner is, so that 1.5 is half as fast again;
            None where that did not complete.
        gain_interval: the ends of the gain's confidence interval; None where it was not confirmed.
        finding: the answer in one line. Empty if the study has none.
        regression: by how much the winner's throughput is below the last known one, and what has changed since, in a
            sentence; empty where it is not, beyond the noise.
        started_at: seconds since the epoch.
        ended_at: seconds since the epoch.
        flow_run_id: the Prefect flow run that began it, and resumes it when retried; None for a command's.
        whereabouts: where its folder stood when it was last opened: by that a copy is told from it.
    """

    study_id: str
    name: str
    method: str
    metric: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    model_dir: str = ""
    ds_config: dict[str, Any] = Field(default_factory=dict)
    status: StudyStatus = StudyStatus.RUNNING
    reason: str = ""
    best_number: int | None = None
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None
    finding: str = ""
    regression: str = ""
    started_at: float = 0.0
    ended_at: float | None = None
    flow_run_id: str | None = None
    whereabouts: Whereabouts | None = None

    @field_validator("metric")
    @classmethod
    def _is_metric(cls, metric: str) -> str:
        if metric not in SEARCH_METRICS:
            raise ValueError("no metric of a search")
        return metric
