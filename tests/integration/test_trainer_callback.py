"""The Hugging Face Trainer with Determined's callback: measured, trained at full length, stopped, resumed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from device_fixtures import TRAINER_FLAGS
from test_core_api import ANY, run_trial
from training_fixtures import Training, Trainings

from zerotune.trial_lib.messages.folders import StopRequest
from zerotune.trial_lib.records.result import Outcome

SCRIPT = "trainer_core_api.py"
OVERWRITES = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
OPTIONS = (
    "--deepspeed",
    "ds_auto.json",
    "--output_dir",
    "output",
    "--logging_steps",
    "1",
    "--eval_strategy",
    "steps",
    "--eval_steps",
    "3",
    "--save_steps",
    "2",
    "--disable_tqdm",
    "true",
    "--report_to",
    "none",
    *TRAINER_FLAGS,
)


def train(trainings: Trainings, *arguments: str, **spec: Any) -> Training:
    hparams = {"deepspeed_config": "ds_auto.json", "overwrite_deepspeed_args": OVERWRITES}
    options = (*OPTIONS, "--max_steps", "100", *arguments)
    return trainings.run_script(ANY, SCRIPT, *options, hparams=hparams, metric="eval_loss", **spec)


@pytest.mark.long
def test_a_trainer_with_the_callback_is_measured(trials: Any, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(ANY, model_dir, ignore=shutil.ignore_patterns("__pycache__"))
    result = run_trial(
        trials,
        SCRIPT,
        *OPTIONS[2:],
        "--learning_rate",
        "1e-3",
        model_dir=model_dir,
        config_flag="--deepspeed",
        micro_batch=3,
        deadline_s=200,
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.micro_batch_arrived == 3
    assert not (model_dir / "output").exists()


@pytest.mark.long
def test_the_callback_reports_saves_and_ends_at_the_experiments_length(trainings: Trainings) -> None:
    training = train(trainings, length={"batches": 5})
    assert training.succeeded, training.logs
    assert sorted(training.metric("loss")) == [1, 2, 3, 4, 5]
    losses = training.metric("eval_loss", "validation")
    assert sorted(losses) == [3, 5]
    assert all(set(record["metrics"]) == {"eval_loss"} for record in training.of_kind("validation"))
    assert [record["batch"] for record in training.of_kind("checkpoint")] == [2, 4, 5]
    assert training.finished is not None
    assert training.finished["best_checkpoint"] == "batch-00000005"
    assert training.finished["metrics"] == {"eval_loss": losses[5]}
    kept = training.root / "checkpoints" / "batch-00000005" / "checkpoint-5"
    assert json.loads((kept / "trainer_state.json").read_text())["global_step"] == 5
    assert json.loads((kept / "my_data.json").read_text()) == {"tokens": 256}
    # The user's own file is as it was: the overrides are in a copy.
    assert json.loads((training.root / "model" / "ds_auto.json").read_text()) == json.loads(
        (ANY / "ds_auto.json").read_text()
    )


def test_a_stopped_trainer_saves_and_is_resumed(trainings: Trainings) -> None:
    stop = StopRequest(trainings.root / "training" / "stop")
    stop.make()
    training = train(trainings, length={"batches": 3})
    assert training.succeeded, training.logs
    assert (stop.was_followed, training.finished) == (True, None)
    assert training.checkpoints == ["batch-00000001"]

    stop.clear()
    training = train(trainings, length={"batches": 3}, latest_checkpoint="batch-00000001")
    assert training.succeeded, training.logs
    assert [record["batch"] for record in training.of_kind("training")] == [1, 2, 3]
    assert training.finished is not None
    assert training.finished["latest_checkpoint"] == "batch-00000003"


@pytest.mark.long
def test_without_transformers_the_callback_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import zerotune.trial_lib.core, zerotune.trial_lib.dsat\n"
        "import zerotune.trial_lib.training.huggingface"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: zerotune.trial_lib.training.huggingface needs transformers (")
    assert last.endswith("type `pip install '.[hf]'` in ZeroTune's repository.")
