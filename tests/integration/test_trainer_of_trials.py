"""A script that builds its trial itself and trains it by `zerotune.Trainer`: full experiments, trials, alone."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_fixtures import DS_CONFIG, TRIAL_CLASSES, Training, Trainings

from zerotune.trial_lib.messages.orders import SPEC_VARIABLE, TrainingSpec
from zerotune.trial_lib.records.result import Outcome


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(DS_CONFIG))
    return path


def train(trainings: Trainings, config: Path, *arguments: str, slots: int = 1, **spec: Any) -> Training:
    hparams = {"deepspeed_config": str(config)}
    return trainings.run_script(TRIAL_CLASSES, "trains.py", *arguments, slots=slots, hparams=hparams, **spec)


def test_it_trains_as_long_as_the_script_says_and_validates_and_saves(trainings: Trainings, config: Path) -> None:
    training = train(trainings, config, "--batches", "4", slots=2)
    assert training.succeeded, training.logs
    assert training.finished is not None
    assert training.finished["batches"] == 4
    assert sorted(training.metric("loss")) == [1, 2, 3, 4]
    assert [record["batch"] for record in training.of_kind("validation")] == [2, 4]
    assert training.checkpoints
    assert training.said()[-1] == "batches of 2 times 2"


def test_the_experiments_length_counts_and_a_second_start_resumes(trainings: Trainings, config: Path) -> None:
    first = train(trainings, config, "--batches", "9", length={"batches": 2})
    assert first.finished is not None, first.logs
    assert first.finished["batches"] == 2
    second = train(trainings, config, "--batches", "9", length={"batches": 3})
    assert second.finished is not None, second.logs
    assert second.finished["batches"] == 3
    assert [record["batch"] for record in second.of_kind("training")] == [1, 2, 3]


def test_a_trial_of_it_is_measured_at_the_candidates_batch(trials: Any) -> None:
    plan = trials.plan("trains.py", model_dir=TRIAL_CLASSES, micro_batch=3, accumulation=2, config_flag="--config")
    hparams = {"deepspeed_config": str(plan.paths.ds_config)}
    spec = TrainingSpec(trial=None, hparams=hparams, tensorboard=str(plan.paths.tensorboard))
    environment = {**plan.program.environment, SPEC_VARIABLE: str(plan.paths.training_spec)}
    program = dataclasses.replace(plan.program, environment=environment)
    result = trials.start(dataclasses.replace(plan, program=program, training_spec=spec)).result()
    assert (result.outcome, result.micro_batch_arrived) == (Outcome.COMPLETED, 3), result.reason


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        pytest.param(["--batches", "2"], "> batches of 2 times 2", 0, marks=pytest.mark.long),
        pytest.param([], "Nothing says how long to train", 1, marks=pytest.mark.long),
    ],
)
def test_it_runs_alone_and_has_to_be_told_how_long(
    arguments: list[str], said: str, status: int, config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "alone"
    shutil.copytree(TRIAL_CLASSES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    root = str(Path(__file__).parents[2])
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **one_rank, "PYTHONPATH": root}
    environment.pop(SPEC_VARIABLE, None)
    run = subprocess.run(
        [sys.executable, "trains.py", "--config", str(config), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, said in run.stdout + run.stderr) == (status, True), run.stderr[-2000:]
