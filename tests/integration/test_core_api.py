"""Programs of the Core API: measured in trials, trained at full length, stopped and resumed."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from full_experiment_fixtures import Folder, run_to_its_end
from study_fixtures import Zerotune
from training_fixtures import Training, Trainings

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.messages.folders import StopRequest
from zerotune.trial_lib.messages.orders import SPEC_VARIABLE, StepWindow, TrainingSpec
from zerotune.trial_lib.records.folders import FullExperimentPaths, StudyStatus
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.full_experiment import FullExperiment, TrainingArguments
from zerotune.trial_lib.study.open_full_experiment import new_full_experiment, resume_newest

PROGRAMS = Path(__file__).parents[1] / "programs"
ANY = PROGRAMS / "any"


def run_trial(trials: Any, script: str, *arguments: str, model_dir: Path, **options: Any) -> TrialResult:
    """Runs a script as a trial that is told what a study's are."""
    plan = trials.plan(script, *arguments, model_dir=model_dir, **options)
    spec = TrainingSpec(
        trial=None,
        hparams={"deepspeed_config": str(plan.paths.ds_config), "checkpoint_rate": 2, "metric_reporting_rate": 1},
        scratch=str(plan.paths.scratch),
        tensorboard=str(plan.paths.tensorboard),
    )
    environment = {**plan.program.environment, SPEC_VARIABLE: str(plan.paths.training_spec)}
    program = dataclasses.replace(plan.program, environment=environment)
    return trials.start(dataclasses.replace(plan, program=program, training_spec=spec)).result()


def train(trainings: Trainings, *arguments: str, name: str = "training", **spec: Any) -> Training:
    """Trains `core_api.py` as the ranks of a full experiment do."""
    hparams = {"deepspeed_config": "ds_config.json", "checkpoint_rate": 2, "metric_reporting_rate": 2}
    return trainings.run_script(ANY, "core_api.py", *arguments, name=name, hparams=hparams, **spec)


# -- trials ------------------------------------------------------------------------------------------------------------


def test_a_program_of_the_core_api_is_measured_and_leaves_nothing_behind(trials: Any, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(ANY, model_dir, ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(model_dir.rglob("*.*"))
    result = run_trial(trials, "core_api.py", model_dir=model_dir, micro_batch=3, accumulation=2, slots=2)
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.micro_batch_arrived == 3
    assert "validation" not in trials.log(result)
    assert sorted(path for path in model_dir.rglob("*.*") if "__pycache__" not in path.parts) == before


def test_a_step_lasts_from_one_to_the_next_wherever_the_reporting_context_stands(trials: Any) -> None:
    result = run_trial(
        trials, "loads_outside_the_context.py", model_dir=PROGRAMS, accumulation=2, window=StepWindow(2, 4, max_steps=3)
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.metrics["latency"] > 0.4  # two micro-batches a step, each loaded for 0.2 s outside the context


# -- full experiments --------------------------------------------------------------------------------------------------


def test_metrics_and_checkpoints_of_a_full_experiment_are_kept(trainings: Trainings) -> None:
    training = train(trainings, slots=2, length={"batches": 6})
    assert training.succeeded, training.logs
    assert sorted(training.metric("loss")) == [2, 4, 6]
    losses = training.metric("validation_loss", "validation")
    assert sorted(losses) == [2, 4, 6]
    assert [record["name"] for record in training.of_kind("checkpoint")] == [f"batch-0000000{n}" for n in (2, 4, 6)]
    best = min(losses, key=lambda batch: losses[batch])
    assert training.checkpoints == sorted({f"batch-{batch:08d}" for batch in (best, 4, 6)})
    assert training.finished == {
        "batches": 6,
        "latest_checkpoint": "batch-00000006",
        "best_checkpoint": f"batch-{best:08d}",
        "best_metric": losses[best],
        "metrics": {"validation_loss": losses[6]},
    }
    manifest = json.loads((training.root / "checkpoints" / "batch-00000006" / "manifest.json").read_text())
    assert manifest["state"] == {"steps_completed": 6}
    assert manifest["world_size"] == 2


def test_a_request_to_stop_is_followed_after_a_checkpoint_and_resumed(trainings: Trainings) -> None:
    stop = StopRequest(trainings.root / "training" / "stop")
    stop.make()
    training = train(trainings, length={"batches": 8})
    assert training.succeeded, training.logs
    assert (stop.is_heeded, stop.was_followed, training.finished) == (True, True, None)
    assert training.checkpoints == ["batch-00000002"]

    stop.clear()
    training = train(trainings, length={"batches": 8}, latest_checkpoint="batch-00000002")
    assert "resumes after 2 steps" in training.logs[0]
    assert training.finished is not None
    assert training.finished["latest_checkpoint"] == "batch-00000008"
    assert not stop.was_followed


def test_a_program_that_asks_for_a_length_nobody_has_named_is_told_where(trainings: Trainings) -> None:
    training = train(trainings)
    assert not training.succeeded
    failure = json.loads((training.root / "rank0.failure.json").read_text())
    assert failure["type"] == "InvalidTrialError"
    assert "add `searcher: {max_length: {batches: 1000}}` to the YAML" in failure["message"]


# -- the driver --------------------------------------------------------------------------------------------------------


@pytest.fixture
def arguments(folder: Folder) -> TrainingArguments:
    """A full experiment of `core_api.py`, of 1000 steps."""
    shutil.rmtree(folder.model)
    shutil.copytree(ANY, folder.model, ignore=shutil.ignore_patterns("__pycache__"))
    experiment = yaml.safe_load((ANY / "deepspeed.yaml").read_text())
    experiment["resources"]["slots_per_trial"] = 1
    experiment["name"] = "tiny"
    experiment["max_restarts"] = 1
    experiment["searcher"]["max_length"] = 1000
    experiment["hyperparameters"] |= {"checkpoint_rate": 2, "metric_reporting_rate": 2}
    folder.config.write_text(yaml.safe_dump(experiment))
    ds_config = json.loads((ANY / "ds_config.json").read_text())
    ds_config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    (folder.model / "ds_config.json").write_text(json.dumps(ds_config))
    program = folder.model / "core_api.py"
    program.write_text(f'import os\nprint(f"pid {{os.getpid()}}", flush=True)\n{program.read_text()}')
    return TrainingArguments(config_path=folder.config, model_dir=folder.model)


def wait_for(running: FullExperiment, text: str) -> None:
    """Waits until rank 0 has printed something."""
    log = running.paths.rank_log(0)
    while text not in (log.read_text() if log.exists() else ""):
        assert running.wait(0.05) is None, running.paths.log.read_text()


@pytest.mark.long
def test_a_full_experiment_survives_a_kill_and_a_stop_and_comes_to_its_end(
    folder: Folder, arguments: TrainingArguments
) -> None:
    running = new_full_experiment(arguments, folder.root)
    running.begin()
    wait_for(running, "batch 4: checkpoint")
    os.kill(folder.pids()[0], signal.SIGKILL)
    wait_for(running, "resumes after ")
    saved = folder.told("checkpoint")[-1]
    assert f"resumes after {saved} steps" in folder.paths.rank_log(0).read_text()
    wait_for(running, f"batch {saved + 4}: checkpoint")
    running.stop()
    running.finish(StudyStatus.CANCELLED, "interrupted")
    running.close()
    assert "asked the training to save a checkpoint and stop" in folder.paths.log.read_text()
    assert StopRequest(folder.paths.stop).was_followed
    assert folder.record["status"] == "cancelled"
    saved = folder.told("checkpoint")[-1]

    folder.config.write_text(folder.config.read_text().replace("max_length: 1000", f"max_length: {saved + 6}"))
    assert run_to_its_end(resume_newest(arguments, folder.root)).completed
    record = folder.record
    assert (record["status"], record["batches"]) == ("completed", saved + 6)
    assert record["best_checkpoint"] is not None
    steps = [step for step, _ in folder.history("validation.validation_loss")]
    assert steps == list(range(2, saved + 7, 2))


@pytest.mark.devices(2)
@pytest.mark.long
def test_an_experiment_of_determined_is_tuned_unchanged(tmp_path: Path, home: Path, server: PrefectServer) -> None:
    zerotune = Zerotune(tmp_path, home)
    shutil.rmtree(zerotune.model)
    shutil.copytree(ANY, zerotune.model, ignore=shutil.ignore_patterns("__pycache__"))
    # Little memory: no trial takes batches of thousands. Two processes of one size differ by some 10 %.
    text = (ANY / "deepspeed.yaml").read_text()
    zerotune.config.write_text(text.replace("slots_per_trial: 2", "slots_per_trial: 2\n  memory_per_slot: 700 MiB"))
    zerotune.environment["PREFECT_API_URL"] = server.api_url
    ended = zerotune.run("random", "--max-trials", "4", "--run-full-experiment", "--json", timeout=280)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    folder = Path(document["folder"])
    assert (folder / "best_ds_config.json").exists()
    paths = FullExperimentPaths(folder / "full_experiment")
    assert json.loads(paths.record.read_text())["batches"] == 30
    assert (paths.checkpoints / "batch-00000030" / "metadata.json").exists()
    assert not list(folder.glob("trials/*/scratch"))
    assert not (zerotune.model / "checkpoints").exists()
