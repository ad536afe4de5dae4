"""`zerotune plan`, as it is typed: a small program, devices that are not here, and what is wrong with the words."""

import functools
import json
import os
import shutil
import signal
import stat
from pathlib import Path

import jsonschema
import mlflow
import pytest

from tests.study_fixtures import Zerotune, run_here
from zerotune.api import Plan, schema_text
from zerotune.trial_lib.plan.plan_record import PlanPaths, PlanRecord, read_run

PROGRAMS = Path(__file__).parents[1] / "programs"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
}
LONG = functools.partial(pytest.param, marks=pytest.mark.long)
COMMAND = ("--", "deepspeed", "--num_gpus", "8", "transformer.py", "--deepspeed_config", "ds_config.json")


@pytest.fixture
def zerotune(tmp_path, tmp_path_factory):
    zerotune = Zerotune(tmp_path, tmp_path_factory.mktemp("home"))
    for name in ("toy.py", "transformer.py", "without_deepspeed.py"):
        shutil.copy(PROGRAMS / name, tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    return zerotune


def files_of(zerotune):
    """The files that the user has, and what is in them."""
    names = [*zerotune.folder.glob("*.py"), *zerotune.folder.glob("*.json"), *zerotune.model.rglob("*")]
    return {path: path.read_bytes() for path in names if path.is_file() and "__pycache__" not in path.parts}


def left_behind(zerotune):
    return {path.name for path in zerotune.folder.iterdir()} - {
        *("model", "experiment.yaml", "toy.py", "transformer.py", "without_deepspeed.py", "ds_config.json"),
        *("__pycache__", "waits.py", "cuda.py", "kernel.py"),
    }


@pytest.mark.long
def test_a_plan_has_tables_an_answer_and_a_command_to_start_with(zerotune):
    before = files_of(zerotune)
    words = ("--on", "h100-80gb:8", "--on", "a100-40gb:2x8", "--price", "h100-80gb=2.99", "-z", "1", "3")
    ended = zerotune.run("plan", *words, *COMMAND)
    assert ended.returncode == 0, ended.stderr
    for said in ("h100-80gb:8, foreseen", "a100-40gb:2x8, foreseen", "z3", "samples/s", "no device has measured them"):
        assert said in " ".join(ended.stdout.split())
    assert "foreseen: z3-mbs" in ended.stderr
    # Each device keeps its 8 samples, so twice as many of them are faster. No command of one host starts them.
    assert "Planned for a100-40gb:2x8: start 2 hosts of 8 ranks." in ended.stderr
    assert "Start with it" not in ended.stderr
    assert files_of(zerotune) == before
    (root,) = (zerotune.folder / "zerotune-plans").iterdir()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    paths = PlanPaths(root)
    plan = PlanRecord.model_validate_json(paths.record.read_text())
    assert plan.chosen is not None
    assert plan.chosen.samples_per_s.value == max(arm.samples_per_s.value for each in plan.devices for arm in each.arms)
    assert plan.parameters == 701_312
    assert plan.tokens == 64
    best = json.loads(paths.best_ds_config.read_text())
    replicas = plan.devices[plan.best].count
    # The user leaves the product open.
    assert {**best, "train_batch_size": 8 * replicas} == plan.chosen.ds_config
    assert "train_batch_size" not in best
    assert "transformer.py" in paths.best_command.read_text()
    assert str(paths.best_ds_config) in paths.best_command.read_text()
    assert [devices.label for devices in plan.devices] == ["h100-80gb:8", "a100-40gb:2x8"]
    for devices in plan.devices:
        labels = {arm.label for arm in devices.arms}
        assert labels == {"z1", "z1-offload-optimizer", "z2", *(f"z3{each}" for each in _OFFLOADS)}
        assert all(arm.stopped == "" for arm in devices.arms)
        assert all(arm.cost is not None for arm in devices.arms) == (devices.price is not None)
    plain = next(arm for arm in plan.devices[0].arms if arm.label == "z1")
    # Only what is offloaded is copied to the host.
    assert plain.seconds["transfers"] < 0.05 * sum(plain.seconds.values())
    run = read_run(paths.run(plan.chosen.runs[0]))
    assert run.parameters == plan.parameters
    page = paths.report.read_text()
    assert plan.answer in page
    assert all(f"Memory of one step on {devices.count} x {devices.device}" in page for devices in plan.devices)
    _is_in_mlflow(zerotune, plan)


_OFFLOADS = ("", "-offload-param", "-offload-optimizer", "-offload-optimizer-offload-param")


def _is_in_mlflow(zerotune, plan):
    client = mlflow.MlflowClient(f"sqlite:///{zerotune.folder}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name == plan.name]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["kind"] == "plan"
    assert run.data.tags["finding"] == plan.answer
    assert run.data.metrics["foreseen.best.samples_per_s"] == pytest.approx(plan.chosen.samples_per_s.value)
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} >= {
        "plan.json",
        "best_ds_config.json",
        "report.html",
    }


@pytest.mark.long
def test_a_pipeline_is_planned_with_the_stages_that_its_code_has(zerotune):
    shutil.copy(PROGRAMS / "pipeline.py", zerotune.folder)
    (zerotune.folder / "ds_config.json").write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 1}}))
    words = ("deepspeed", "--num_gpus", "4", "pipeline.py", "--deepspeed_config", "ds_config.json")
    ended = zerotune.run("plan", "--on", "h100-80gb:4", "--json", "--", *words)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    (devices,) = document["devices"]
    assert {arm["label"] for arm in devices["arms"]} == {"z0", "z1", "z1-offload-optimizer"}
    assert not any(arm["stopped"] for arm in devices["arms"])
    assert document["parameters"] == 24 * 32 + 32 + 4 * 32 * 32 + 32 * 8 + 8
    best = next(arm["ds_config"] for arm in devices["arms"] if arm["label"] == devices["best"])
    assert best["train_batch_size"] == 8


def test_a_yaml_is_planned_as_a_command_is_and_json_is_one_document(zerotune):
    ended = zerotune.run("plan", "--on", "l4-24gb:2", "-z", "2", "--json", str(zerotune.config), str(zerotune.model))
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    jsonschema.validate(document, json.loads(schema_text(Plan)))
    assert document["foreseen"] is True
    assert document["devices"][0]["device"] == "l4-24gb"
    assert Path(document["best_ds_config_path"]).is_file()


@pytest.mark.long
def test_switches_of_the_program_have_rows_notes_and_their_words_in_the_command(zerotune):
    for file in (PROGRAMS / "switched").glob("*.*"):
        shutil.copy(file, zerotune.folder)
    (zerotune.folder / "train.yaml").write_text("model:\n  loops: 3\n")
    vary = ("--twice=true,false", "train.yaml:model.loops=1,3", "--kernel=relu,gelu", "OMP_NUM_THREADS=1,2")
    words = [word for each in vary for word in ("--vary", each)]
    command = ("deepspeed", "--num_gpus", "1", "train.py", "--deepspeed_config", "ds_config.json", "--twice")
    ended = zerotune.run(
        "plan",
        "--on",
        "h100-80gb:1",
        "-z",
        "1",
        "--json",
        *words,
        "--",
        *command,
        "--config",
        "train.yaml",
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    (devices,) = document["devices"]
    rows = {arm["label"]: arm for arm in devices["arms"] if "offload" not in arm["label"]}
    loops = "train.yaml:model.loops=1"
    assert rows.keys() == {"z1", "z1-no-twice", f"z1-{loops}", f"z1-no-twice-{loops}"}
    assert rows["z1"]["is_own"]
    assert rows["z1"]["ds_config"]["program"] == {"--twice": True, "train.yaml:model.loops": 3}
    assert rows["z1-no-twice"]["samples_per_s"]["value"] > 1.5 * rows["z1"]["samples_per_s"]["value"]
    assert "ZeRO 1 with no --twice" in document["answer"]
    assert "program" not in document["best_ds_config"]
    assert "--kernel=gelu has the rows of --kernel=relu: in your arm its run does the same." in document["notes"]
    assert any(note.startswith("OMP_NUM_THREADS stays as typed") for note in document["notes"])
    assert "--twice" not in document["best_command"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ("--kernels=relu,gelu", "your program has no option --kernels, and --kernel is the nearest"),
        ("--kernel=relu,none", "your program refuses a value of --kernel"),
        ("--kernel=relu,relu", "--kernel has relu twice"),
        ("other.yaml:model.loops=1,2", "no argument of the program is other.yaml"),
    ],
)
def test_a_switch_that_the_program_does_not_have_ends_a_plan_and_leaves_nothing(zerotune, vary, said):
    for file in (PROGRAMS / "switched").glob("*.*"):
        shutil.copy(file, zerotune.folder)
    command = ("deepspeed", "--num_gpus", "1", "train.py", "--deepspeed_config", "ds_config.json")
    ended = zerotune.run("plan", "--on", "h100-80gb:1", "--vary", vary, "--", *command, timeout=200)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert not list(zerotune.folder.glob("zerotune-plans/*"))


@pytest.mark.long
def test_ctrl_c_leaves_nothing_behind(zerotune):
    running = zerotune.start("plan", "--on", "h100-80gb:8", *COMMAND)
    running.wait_until(lambda: "still foreseeing" in running.said or "foreseen:" in running.said, "a first word")
    os.kill(running.process.pid, signal.SIGINT)
    ended = running.follow(60)
    assert ended.returncode == 130, ended.stderr
    assert "Interrupted. Nothing of it is left. Start again with: zerotune plan --on h100-80gb:8" in ended.stderr
    assert left_behind(zerotune) <= {"zerotune-plans"} | {path for path in left_behind(zerotune) if "." in path}
    assert not [*(zerotune.folder / "zerotune-plans").glob("*")]
    assert not (zerotune.folder / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "h100:8"], '--on h100:8: "h100" may be h100-80gb, h100-80gb-pcie or h100-94gb-nvl.'),
        LONG(["--on", "h100-80gb:0"], "--on h100-80gb:0:"),
        LONG(["--on", "h100-80gb:8", "--price", "h100-80gb"], "--price h100-80gb:"),
        LONG(["--on", "h100-80gb:8", "--devices", "no.yaml"], "no.yaml: it cannot be read"),
        (["--on", "h100-80gb:8", "--whole", "3"], '--whole: "3" is no length of a training: write --whole 3epochs'),
        LONG(["--prices", "ds_config.json"], 'ds_config.json: no device is called "train_micro_batch_size_per_gpu".'),
        (["--on", "h100-80gb:3", "--train-batch-size", "8"], "a global batch of 8 samples cannot be divided over 3"),
        LONG(["--on", "h100-80gb:8", "--free-batch", "--train-batch-size", "8"], "exclude each other"),
    ],
)
def test_wrong_words_are_one_sentence_and_leave_nothing(zerotune, words, said):
    ended = run_here(zerotune.folder, "plan", *words, *COMMAND)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (zerotune.folder / "zerotune-plans").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "program", "said"),
    [
        ("waits.py", "import time\ntime.sleep(1000)\n", "waits.py:2"),
        ("cuda.py", "import torch\ntorch.zeros(1, device='cuda').data_ptr()\nimport nothing_like_it\n", "cuda.py:"),
        ("kernel.py", "print('no engine here')\n", "engine"),
    ],
)
def test_a_program_that_comes_to_no_engine_is_one_sentence(zerotune, name, program, said):
    (zerotune.folder / name).write_text(program)
    ended = zerotune.run("plan", "--on", "h100-80gb:8", "--deadline", "15", "--", "deepspeed", name)
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("zerotune: ")
    assert said in last
    assert not [*(zerotune.folder / "zerotune-plans").glob("*")]
    assert not (zerotune.folder / "mlflow.db").exists()
