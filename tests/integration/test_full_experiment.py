"""Full experiments: trained, restarted, resumed, refused; what the folder, Prefect and MLflow have of them."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from case_fixtures import quick_first
from full_experiment_fixtures import Folder, run_to_its_end, runs_of
from mlflow.tracking import MlflowClient
from study_fixtures import Zerotune, query, run_here

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.launch import full_training
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import MetricsReader
from zerotune.trial_lib.records.folders import StudyStatus
from zerotune.trial_lib.study import program
from zerotune.trial_lib.study.open_full_experiment import new_full_experiment, resume_newest

BUCKETS = {"reduce_bucket_size": 1000000, "allgather_bucket_size": 1000000}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a trial class that need no torch: what the driver sees of them is the same."""
    monkeypatch.setattr(program, "TRIAL_CLASS_MODULE", "stand_in")


def run(folder: Folder, home: Path, server: PrefectServer, *options: str) -> Any:
    command = folder.command(home)
    return command.run(*command.arguments, *options, PREFECT_API_URL=server.api_url, timeout=120)


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_a_training_that_dies_resumes_from_its_last_checkpoint(
    folder: Folder, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_training, "_FIRST_PAUSE_S", 0.1)
    arguments = folder.write_class(batches=8, period=3, max_restarts=3, hparams={"crash_at": [2, 5]})
    end = run_to_its_end(new_full_experiment(arguments, folder.root))
    assert (end.completed, end.reason) == (True, "")
    record = folder.record
    assert (record["status"], record["attempts"], record["batches"]) == ("completed", 3, 8)
    assert record["best_checkpoint"] == "batch-00000006"
    assert record["best_metric"] == pytest.approx(1 / 6)
    notes = [line.text for line in MetricsReader(folder.paths.metrics).read() if line.kind == "note"]
    assert notes == ["resuming from batch 0", "resuming from batch 0", "resuming from batch 3"]
    log = folder.paths.log.read_text()
    for attempt in (1, 2):
        assert f"attempt {attempt} of 4 crashed: Rank 0 was killed by SIGKILL." in log


@pytest.mark.long
def test_metrics_of_a_repeated_batch_are_in_mlflow_once(folder: Folder, stand_in: None) -> None:
    arguments = folder.write_class(batches=6, period=3, max_restarts=1, hparams={"crash_at": [5]})
    full_experiment = new_full_experiment(arguments, folder.root)
    assert run_to_its_end(full_experiment).completed
    assert full_experiment.tracker.last_error is None
    assert folder.told("training") == [1, 2, 3, 4, 5, 4, 5, 6]
    assert folder.history("training.loss") == [(batch, 1 / batch) for batch in range(1, 7)]
    assert folder.history("validation.validation_loss") == [(3, 1 / 3), (6, 1 / 6)]
    assert folder.history("training.throughput") == []  # infinite


@pytest.mark.long
def test_the_host_is_watched_meanwhile(folder: Folder, stand_in: None) -> None:
    assert run_to_its_end(new_full_experiment(folder.write_class(batches=2), folder.root)).completed
    (sample,) = MetricsReader(folder.paths.system_metrics).read()
    assert sample.metrics["cpu_percent"] > 0
    assert 0 <= sample.metrics["training_memory"] < sample.metrics["memory_used"]
    assert [step for step, _ in folder.history("system.cpu_percent")] == [2]


@pytest.mark.long
def test_a_script_that_crashes_twice_is_started_again_by_the_same_command(folder: Folder) -> None:
    arguments = folder.write_script("--steps", "4", "--crashes", "2", max_restarts=2)
    assert run_to_its_end(new_full_experiment(arguments, folder.root)).completed
    assert folder.record["attempts"] == 3
    assert folder.record["batches"] is None
    log = folder.paths.rank_log(0).read_text()
    assert [f"step {step} at micro-batch 2" in log for step in range(1, 5)] == [True] * 4
    assert log.count("pid ") == 3
    told = folder.paths.log.read_text()
    assert "attempt 1 of 3 crashed: The program raised ValueError: the disk with shard 1 is away. Log: " in told
    assert "attempt 2 of 3 crashed: The program raised ValueError: the disk with shard 2 is away. Log: " in told


@pytest.mark.long
@pytest.mark.devices(2)
def test_a_rank_that_leaves_without_a_record_is_a_crash_whatever_its_exit_status(folder: Folder) -> None:
    arguments = folder.write_script("--vanish", "0", resources={"slots_per_trial": 2})
    end = run_to_its_end(new_full_experiment(arguments, folder.root))
    assert not end.completed
    assert "Rank 0 ended with exit code 0 and left no result; its last words: step 4 at micro-batch 2" in end.reason
    assert str(folder.paths.rank_log(0)) in end.reason
    assert folder.record["status"] == "failed"


@pytest.mark.long
def test_a_class_that_breaks_the_api_is_not_started_again(folder: Folder, stand_in: None) -> None:
    arguments = folder.write_class(max_restarts=3, hparams={"invalid": True})
    end = run_to_its_end(new_full_experiment(arguments, folder.root))
    said = "model_def:Tiny has registered no engine. Call context.wrap_model_engine(engine)."
    assert end.reason == f"{said} Log: {folder.paths.rank_log(0)}"
    assert (folder.record["attempts"], folder.record["reason"]) == (1, end.reason)


def test_a_stopped_training_is_resumed_in_the_same_folder_and_the_same_run(folder: Folder, stand_in: None) -> None:
    arguments = folder.write_class(batches=1000, period=2, hparams={"step_seconds": 0.1})
    first = new_full_experiment(arguments, folder.root)
    first.begin()
    while "batch 3: training" not in folder.paths.log.read_text():
        assert first.wait(0.05) is None
    with pytest.raises(InputError, match="another process drives this full experiment"):
        resume_newest(arguments, folder.root)
    first.stop()
    first.finish(StudyStatus.CANCELLED, "interrupted")
    first.close()
    saved = folder.told("checkpoint")[-1]
    assert (folder.record["status"], folder.record["best_checkpoint"]) == ("cancelled", f"batch-{saved:08d}")
    (before,) = folder.runs
    assert before.info.status == "KILLED"

    arguments = folder.write_class(batches=saved + 4, period=2)  # another length may be asked for
    assert run_to_its_end(resume_newest(arguments, folder.root)).completed
    (run,) = folder.runs
    assert (run.info.run_id, run.info.status) == (before.info.run_id, "FINISHED")
    assert run.data.tags["best_checkpoint"] == f"batch-{saved + 4:08d}"
    assert folder.history("training.loss") == [(batch, 1 / batch) for batch in range(1, saved + 5)]
    with pytest.raises(InputError, match="there is no unfinished full experiment named tiny here"):
        resume_newest(arguments, folder.root)


@pytest.mark.long
@pytest.mark.devices(2)
def test_a_script_trains_to_its_end_with_the_configuration_merged_in(folder: Folder) -> None:
    arguments = folder.write_script(
        environment={"environment_variables": {"HF_TOKEN": "hf_secret"}}, resources={"slots_per_trial": 2}
    )
    best = folder.root / "best.json"
    best.write_text('{"train_micro_batch_size_per_gpu": 5, "zero_optimization": {"stage": 2}}')
    full_experiment = new_full_experiment(arguments.model_copy(update={"ds_config": best}), folder.root)
    assert run_to_its_end(full_experiment).completed
    paths, record = folder.paths, folder.record
    assert record["ds_config"] == json.loads(paths.ds_config.read_text())
    assert record["ds_config"]["zero_optimization"] == {**BUCKETS, "stage": 2}
    for rank in range(2):
        log = paths.rank_log(rank).read_text()
        assert f"of {paths.ds_config} tuned False" in log
        assert "step 4 at micro-batch 5" in log
    assert "hf_secret" in paths.experiment.read_text()
    (run,) = folder.runs
    assert run.info.status == "FINISHED"
    assert run.data.tags["kind"] == "full_experiment"
    assert run.data.params["train_micro_batch_size_per_gpu"] == "5"
    files = {file.path for file in MlflowClient(tracking_uri=folder.tracking_uri).list_artifacts(run.info.run_id)}
    assert files == {"ds_config.json"}


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_trial_class_trains_to_its_length_and_tells_as_it_goes(
    folder: Folder, home: Path, server: PrefectServer
) -> None:
    folder.write_class(batches=6, period=2, hparams={"lr": 0.5})
    best = folder.root / "best.json"
    best.write_text('{"train_micro_batch_size_per_gpu": 4}')
    ended = run(folder, home, server, "--ds-config", str(best))
    assert ended.returncode == 0, ended.stderr
    record, paths = folder.record, folder.paths
    assert (record["status"], record["batches"]) == ("completed", 6)
    assert record["ds_config"]["train_micro_batch_size_per_gpu"] == 4
    for batch in range(1, 7):
        assert ended.stderr.count(f"batch {batch}: training ") == 1
    for batch in (2, 4, 6):
        assert ended.stderr.count(f"batch {batch}: validation validation_loss ") == 1
    assert f"Best checkpoint: {paths.checkpoints / record['best_checkpoint']}, validation_loss " in ended.stderr
    assert (paths.checkpoints / record["best_checkpoint"]).is_dir()
    assert "Trained 6 batches to the end." in ended.stderr
    assert [step for step, _ in folder.history("training.loss")] == [1, 2, 3, 4, 5, 6]
    assert dict(folder.history("validation.validation_loss"))[6] > 0
    (run_there,) = folder.runs
    assert run_there.data.params["hyperparameters.lr"] == "0.5"
    assert float(run_there.data.tags["best_metric"]) == pytest.approx(record["best_metric"], rel=1e-4)
    shown = query(
        home / "zerotune" / "prefect" / "prefect.db",
        "select flow.name, run.state_type, artifact.key, artifact.data from flow_run run "
        "join flow on flow.id = run.flow_id join artifact on run.id = artifact.flow_run_id where run.name = ?",
        paths.root.name,
    )
    assert {row[:2] for row in shown} == {("experiment", "COMPLETED")}
    artifacts = {key: data for _, _, key, data in shown}
    assert artifacts["training"] == 100.0
    assert record["best_checkpoint"] in artifacts["full-experiment"]


@pytest.mark.long
def test_a_script_that_keeps_crashing_fails_and_says_why(folder: Folder, home: Path, server: PrefectServer) -> None:
    folder.write_script("--crashes", "9", max_restarts=1)
    ended = run(folder, home, server, "--json")
    assert ended.returncode == 3, ended.stderr
    document = json.loads(ended.stdout)
    assert (document["folder"], document["status"]) == (str(folder.paths.root), "failed")
    why = f"The program raised ValueError: the disk with shard 2 is away. Log: {folder.paths.rank_log(0)}"
    assert document["reason"] == f"{why} That was attempt 2 of 2."
    assert f"attempt 2 of 2 crashed: {why}" in ended.stderr
    (run_there,) = folder.runs
    assert (run_there.info.status, run_there.data.tags["reason"]) == ("FAILED", document["reason"])


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSALS = {
    "no such configuration": (["--ds-config", "none.json"], "--ds-config none.json: this file does not exist."),
    "broken configuration": (["--ds-config", "experiment.yaml"], "experiment.yaml:1:1: not valid JSON"),
    "nothing to resume": (["--resume"], "there is no unfinished full experiment named tiny here."),
    "nothing to include": (["-i", "none.py"], "--include none.py: this does not exist."),
}


def assert_refused(folder: Folder, home: Path, said: str, *options: str) -> None:
    ended = run_here(folder.root, *folder.command(home).arguments, *options, XDG_DATA_HOME=str(home))
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("zerotune: ")
    assert said in ended.stderr
    assert not (folder.root / "zerotune-experiments").exists()


@pytest.mark.parametrize("case", quick_first(1, REFUSALS))
def test_a_wrong_option_is_refused_in_one_sentence(case: str, folder: Folder, home: Path) -> None:
    folder.write_script()
    options, said = REFUSALS[case]
    assert_refused(folder, home, said, *options)


def test_a_class_without_a_length_is_refused(folder: Folder, home: Path) -> None:
    folder.write("model_def:Tiny")
    assert_refused(folder, home, f"{folder.config}: searcher.max_length is missing")


def test_more_slots_than_the_host_has_are_refused(folder: Folder, home: Path) -> None:
    folder.write_script(resources={"slots_per_trial": 4096})
    assert_refused(folder, home, "slots_per_trial is 4096, but this host has")


@pytest.mark.long
def test_a_changed_configuration_is_not_resumed(folder: Folder) -> None:
    arguments = folder.write_script("--crashes", "1")
    assert not run_to_its_end(new_full_experiment(arguments, folder.root)).completed
    config = folder.model / "ds_config.json"
    config.write_text(config.read_text().replace("1e-3", "1e-4"))
    with pytest.raises(InputError, match="the DeepSpeed configuration has changed since the full experiment began"):
        resume_newest(arguments, folder.root)


@pytest.mark.long
def test_a_configuration_that_deepspeed_has_refused_may_be_mended(folder: Folder) -> None:
    config = folder.model / "ds_config.json"
    sound = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}})
    config.write_text(json.dumps({**json.loads(sound), "sparse_attention": {"mode": "fixed"}}))
    (folder.model / "train.py").write_text(
        "import argparse, deepspeed, torch\n"
        "args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()\n"
        "deepspeed.initialize(args=args, model=torch.nn.Linear(1, 1))\n"
    )
    arguments = folder.write_script(max_restarts=3)
    end = run_to_its_end(new_full_experiment(arguments, folder.root))
    assert "deepspeed.initialize has failed: sparse_attention: DeepSpeed 0." in end.reason
    assert folder.record["attempts"] == 1
    config.write_text(sound)
    assert run_to_its_end(resume_newest(arguments, folder.root)).completed
    assert "sparse_attention" not in folder.record["ds_config"]


def test_the_flow_takes_its_parameters_as_json(folder: Folder) -> None:
    from zerotune.flows.tune import experiment

    given = {"config_path": "/abs/experiment.yaml", "model_dir": "/abs/model", "ds_config": "/b.json"}
    parameters = experiment.validate_parameters(given)
    assert (parameters["config_path"], parameters["ds_config"]) == (Path("/abs/experiment.yaml"), Path("/b.json"))


# -- of a study --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_study_s_full_experiment_is_within_it_and_is_resumed_with_it(
    tmp_path: Path, home: Path, server: PrefectServer
) -> None:
    zerotune = Zerotune(tmp_path, home, program="--num_steps 500 --step_seconds 0.05")
    arguments = ("binary", "-mt", "2", "-z", "1", "-m", "throughput", "--run-full-experiment")
    command = zerotune.start(*arguments, PREFECT_API_URL=server.api_url)
    studies = tmp_path / "zerotune-studies"
    command.wait_until(
        lambda: any("pid " in log.read_text() for log in studies.glob("*/full_experiment/rank0.log")), "the training"
    )
    command.process.send_signal(signal.SIGINT)
    ended = command.end(timeout=20)
    study, paths = zerotune.study, zerotune.study.paths
    assert ended.returncode == 130, ended.stderr
    assert f"Resume with: zerotune resume {paths.root}" in ended.stderr
    assert command.left_over(2) == []
    record = paths.full_experiment.root / "record.json"
    assert (study.record["status"], json.loads(record.read_text())["status"]) == ("cancelled", "cancelled")

    script = zerotune.model / "train.py"
    script.write_text(script.read_text().replace("time.sleep(args.step_seconds)", "pass"))
    ended = zerotune.run("resume", paths.root, "--json", PREFECT_API_URL=server.api_url)
    assert ended.returncode == 0, ended.stderr
    trained, study_id = json.loads(ended.stdout)["full_experiment"], paths.root.name
    best = json.loads(paths.best_ds_config.read_text())
    assert (trained["status"], trained["attempts"], trained["ds_config"]) == ("completed", 2, best)
    said = f"trained 500 steps at micro-batch {best['train_micro_batch_size_per_gpu']}"
    assert said in (paths.full_experiment.root / "rank0.log").read_text()
    rows = query(
        zerotune.prefect_database,
        "select sub.name, sub.state_type from flow_run sub join task_run parent on parent.id = sub.parent_task_run_id "
        "join flow_run whole on whole.id = parent.flow_run_id where whole.name = ? order by sub.created",
        study_id,
    )
    assert rows == [(f"{study_id}-full-experiment", state) for state in ("CANCELLED", "COMPLETED")]
    runs = {run.data.tags["record_id"]: run for run in runs_of(f"sqlite:///{tmp_path}/mlflow.db")}
    full_experiment = runs[f"{study_id}-full-experiment"]
    assert full_experiment.data.tags["mlflow.parentRunId"] == runs[study_id].info.run_id
    assert full_experiment.data.tags["study_id"] == study_id
    assert full_experiment.info.status == "FINISHED"


IN_CODE = """
import deepspeed, torch

config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
}
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
print(engine.train_micro_batch_size_per_gpu(), engine.zero_optimization_stage(), engine.get_lr(), flush=True)
"""


@pytest.mark.long
def test_a_configuration_that_stands_in_the_code_gives_way_to_the_winner(folder: Folder) -> None:
    (folder.model / "in_code.py").write_text(IN_CODE)
    winner = folder.root / "winner.json"
    winner.write_text(json.dumps({"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}))
    arguments = folder.write("python3 in_code.py", hyperparameters={}).model_copy(update={"ds_config": winner})
    assert run_to_its_end(new_full_experiment(arguments, folder.root)).completed
    assert "8 1 [0.5]" in folder.paths.rank_log(0).read_text()


PARTITIONED = """
import argparse, deepspeed, torch
args, _ = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_known_args()
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).sum())
engine.step()
print("stage", engine.zero_optimization_stage(), "partitioned", hasattr(model.weight, "ds_id"))
# Another one, which only computes, with a configuration of its own.
with deepspeed.zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}):
    teacher = torch.nn.Linear(4, 1)
print("teacher partitioned", hasattr(teacher.weight, "ds_id"))
"""


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_code_that_partitions_its_model_itself_trains_with_a_winner_of_any_stage(folder: Folder, stage: int) -> None:
    (folder.model / "partitioned.py").write_text(PARTITIONED)
    winner = folder.root / "winner.json"
    winner.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    arguments = folder.write("python3 partitioned.py --deepspeed_config ds_config.json").model_copy(
        update={"ds_config": winner}
    )
    assert run_to_its_end(new_full_experiment(arguments, folder.root)).completed
    log = folder.paths.rank_log(0).read_text()
    assert f"stage {stage} partitioned {stage == 3}" in log
    assert "teacher partitioned True" in log
