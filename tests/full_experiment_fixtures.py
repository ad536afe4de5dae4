"""What the tests of full experiments share: a folder to run them in, a Prefect server, and what they leave behind."""

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from study_fixtures import Zerotune

from zerotune.flows import prefect_server
from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.launch.full_training import TrainingEnd
from zerotune.trial_lib.records.folders import FullExperimentPaths
from zerotune.trial_lib.study.full_experiment import FullExperiment, TrainingArguments

PROGRAM = Path(__file__).parent / "programs" / "full_experiment"
SCRIPT = "python3 train.py --deepspeed_config ds_config.json"


class Folder:
    """A working folder with a model directory, its experiment, and the full experiments that were run there.

    Attributes:
        root: the working folder.
        model: the model directory, a copy of `tests/programs/full_experiment`.
        config: the experiment's YAML.

    Args:
        root: the working folder.
        store: an MLflow store with its tables, for this folder to have a copy of: making them takes seconds.
    """

    def __init__(self, root: Path, store: Path) -> None:
        self.root = root
        self.model = root / "model"
        self.config = root / "experiment.yaml"
        shutil.copytree(PROGRAM, self.model, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(store, root / "mlflow.db")

    def write(self, entrypoint: str, **settings: Any) -> TrainingArguments:
        """Writes the experiment, and returns the arguments that train it; `hparams` are its hyperparameters."""
        hparams = settings.pop("hparams", {})
        experiment = {
            "name": "tiny",
            "entrypoint": entrypoint,
            "hyperparameters": {"deepspeed_config": "ds_config.json", **hparams},
            "max_restarts": 0,
            **settings,
        }
        self.config.write_text(yaml.safe_dump(experiment, sort_keys=False))
        return TrainingArguments(config_path=self.config, model_dir=self.model)

    def write_script(self, *options: str, **settings: Any) -> TrainingArguments:
        """Writes an experiment that trains by a plain script."""
        return self.write(" ".join([SCRIPT, *options]), **settings)

    def write_class(self, batches: int = 6, period: int = 2, **settings: Any) -> TrainingArguments:
        """Writes an experiment that trains by a trial class, reports each batch, and saves every `period` batches."""
        return self.write(
            "model_def:Tiny",
            searcher={"max_length": {"batches": batches}},
            min_validation_period=period,
            min_checkpoint_period=period,
            scheduling_unit=1,
            **settings,
        )

    @property
    def paths(self) -> FullExperimentPaths:
        """The one full experiment there is."""
        (root,) = (self.root / "zerotune-experiments").iterdir()
        return FullExperimentPaths(root)

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.paths.record.read_text())
        return record

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.root}/mlflow.db"

    @property
    def runs(self) -> list[Run]:
        return runs_of(self.tracking_uri)

    def history(self, name: str) -> list[tuple[int, float]]:
        """Returns a metric of the one MLflow run, as (step, value)."""
        (run,) = self.runs
        client = MlflowClient(tracking_uri=self.tracking_uri)
        return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]

    def told(self, kind: str) -> list[int]:
        """Returns the batches of a kind of line, those that were told again among them."""
        if not self.paths.metrics.exists():
            return []
        lines = [json.loads(line) for line in self.paths.metrics.read_text().splitlines() if line.endswith("}")]
        return [line["batch"] for line in lines if line["kind"] == kind]

    def pids(self, rank: int = 0) -> list[int]:
        """Returns the process ids that a rank has printed, one for each attempt."""
        log = self.paths.rank_log(rank)
        text = log.read_text() if log.exists() else ""
        return [int(pid) for pid in re.findall(r"^pid (\d+)", text, re.MULTILINE)]

    def command(self, home: Path) -> "Command":
        """Returns the command, run in this folder."""
        return Command(self, home)


class Command(Zerotune):
    """`zerotune train` in a folder that is there already."""

    def __init__(self, folder: Folder, home: Path) -> None:  # not a study's: that copies a program of its own
        self.folder = folder.root
        self.model, self.config = folder.model, folder.config
        self.prefect_database = home / "zerotune" / "prefect" / "prefect.db"
        kept = {"PREFECT_API_AUTH_STRING"}  # of the server of the tests
        self.environment = {
            name: value for name, value in os.environ.items() if name in kept or not name.startswith("PREFECT_")
        }
        for name in ("MLFLOW_TRACKING_URI", "DS_ACCELERATOR"):
            self.environment.pop(name, None)
        self.environment["XDG_DATA_HOME"] = str(home)
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    @property
    def arguments(self) -> tuple[str, str, str]:
        """What every `zerotune train` of this folder begins with."""
        return "train", str(self.config), str(self.model)


def run_to_its_end(full_experiment: FullExperiment, timeout_s: float = 60) -> TrainingEnd:
    """Runs an open full experiment as the flow does."""
    deadline = time.monotonic() + timeout_s
    full_experiment.begin()
    try:
        while (end := full_experiment.wait(0.05)) is None:
            assert time.monotonic() < deadline, full_experiment.paths.log.read_text()
        return end
    finally:
        full_experiment.close()


def runs_of(tracking_uri: str, name: str = "tiny") -> list[Run]:
    client = MlflowClient(tracking_uri=tracking_uri)
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def new_store(folder: Path) -> Path:
    """Returns an MLflow store with its tables and no experiment."""
    database = folder / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()
    return database


@contextlib.contextmanager
def prefect_server_of(home: Path) -> Iterator[PrefectServer]:
    """Yields a Prefect server that is there before any command is, with its database in ZeroTune's home."""
    before = os.environ.get("XDG_DATA_HOME")
    os.environ["XDG_DATA_HOME"] = str(home)
    try:
        with patch.object(prefect_server, "drawn_credential", lambda: os.environ["PREFECT_API_AUTH_STRING"]):
            server = PrefectServer()
    finally:
        os.environ.pop("XDG_DATA_HOME")
        if before is not None:
            os.environ["XDG_DATA_HOME"] = before
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()
