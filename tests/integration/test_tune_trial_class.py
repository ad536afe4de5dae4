"""A whole study of a trial class: tuned without a line for it in the class, then trained at full length."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from full_experiment_fixtures import runs_of
from study_fixtures import Zerotune
from training_fixtures import TRIAL_CLASSES

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.folders import FullExperimentPaths, OwnCommand
from zerotune.trial_lib.records.result import Outcome

EXPERIMENT = {
    "name": "tiny-class",
    "entrypoint": "python3 -m determined.launch.deepspeed --trial model_def:Tiny",
    "hyperparameters": {"deepspeed_config": "ds_config.json", "samples": 64},
    "resources": {"slots_per_trial": 1},
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"epochs": 2}},
    "min_validation_period": {"epochs": 1},
    "scheduling_unit": 4,
}


pytestmark = [pytest.mark.alone, pytest.mark.long]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Zerotune:
    zerotune = Zerotune(tmp_path_factory.mktemp("trial-class"), home)
    config = json.loads((zerotune.model / "ds_config.json").read_text())
    shutil.rmtree(zerotune.model)
    shutil.copytree(TRIAL_CLASSES, zerotune.model, ignore=shutil.ignore_patterns("__pycache__"))
    (zerotune.model / "ds_config.json").write_text(json.dumps(config))
    zerotune.config.write_text(yaml.safe_dump(EXPERIMENT))
    return zerotune


@pytest.fixture(scope="module")
def ended(command: Zerotune, server: PrefectServer) -> subprocess.CompletedProcess[str]:
    arguments = ("--max-trials", "3", "-z", "1", "--search-range-factor", "1e-8", "--run-full-experiment")
    return command.run("binary", *arguments, PREFECT_API_URL=server.api_url)


def test_a_trial_class_is_tuned(command: Zerotune, ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stderr
    results = command.study.results
    assert len(results) >= 3
    assert {result.outcome for result in results.values()} == {Outcome.COMPLETED}
    best = json.loads(command.study.paths.best_ds_config.read_text())
    assert best["train_micro_batch_size_per_gpu"] >= 1


def test_the_command_to_train_with_the_winner_is_zerotunes_own(
    command: Zerotune, ended: subprocess.CompletedProcess[str]
) -> None:
    own = OwnCommand.of(command.study.paths)
    assert own is not None
    assert (own.words[1], own.words[3]) == ("train", str(command.model))
    # The user's own files, when they have the answer.
    assert own.applied == (own.words[0], "train", str(command.config), str(command.model))


def test_the_winner_is_trained_at_full_length(command: Zerotune, ended: subprocess.CompletedProcess[str]) -> None:
    paths = FullExperimentPaths(command.study.paths.full_experiment.root)
    record = json.loads(paths.record.read_text())
    finished = json.loads(paths.finished.read_text())
    assert record["status"] == "completed", record["reason"]
    assert record["ds_config"] == json.loads(command.study.paths.best_ds_config.read_text())
    config = record["ds_config"]  # of one replica; the answer leaves the global batch to DeepSpeed
    samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert finished["batches"] == 2 * 64 // samples
    assert (paths.checkpoints / finished["best_checkpoint"] / "manifest.json").exists()


def test_the_full_experiment_is_within_the_study_in_mlflow(
    command: Zerotune, ended: subprocess.CompletedProcess[str]
) -> None:
    study_id = command.study.paths.root.name
    runs = {run.data.tags["record_id"]: run for run in runs_of(f"sqlite:///{command.folder}/mlflow.db", "tiny-class")}
    trained = runs[f"{study_id}-full-experiment"]
    assert trained.data.tags["mlflow.parentRunId"] == runs[study_id].info.run_id
    assert {"training.loss", "validation.validation_loss"} <= set(trained.data.metrics)


def test_the_command_that_the_study_names_trains_as_well(
    command: Zerotune, ended: subprocess.CompletedProcess[str], server: PrefectServer
) -> None:
    words = command.study.paths.best_command.read_text().split()
    again = command.run(*words[words.index("train") :], PREFECT_API_URL=server.api_url)
    assert again.returncode == 0, again.stderr
    (root,) = (command.folder / "zerotune-experiments").iterdir()
    assert json.loads((root / "record.json").read_text())["status"] == "completed"
