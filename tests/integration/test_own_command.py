"""The answer in the user's own files: where a value stands is found, and the command trains as the trials did."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import PROGRAMS
from device_fixtures import need
from others_fixtures import Tuned, differences, expect_trained_alike, plain_configuration
from study_fixtures import Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.result import Outcome

TRAIN = """
import sys
import deepspeed
import torch
import yaml

with open(sys.argv[-1]) as file:
    settings = yaml.safe_load(file)["train"]
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings["deepspeed"])
for _ in range(400):
    loss = engine(torch.randn(settings["batch"], 32, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
"""
CONF = """\
# by hand
train:
  deepspeed: "ds.json"
  batch: 4   # rows
eval: {batch: 4}
"""
OWN = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


@pytest.fixture
def typed(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    """Where the command is typed, beside its program and files."""
    found = Zerotune(tmp_path, home, slots=2).on_servers(server.api_url, empty_store)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "conf.yaml").write_text(CONF)
    (tmp_path / "ds.json").write_text(json.dumps(OWN, indent=2) + "\n")
    return found


def test_nested_keys_of_a_programs_own_file_are_found_and_the_answer_is_applied(typed: Zerotune) -> None:
    command = ("deepspeed", "--num_gpus", "1", "train.py", "conf.yaml")
    ended = typed.run("tune", "--json", "--max-trials", "3", "-z", "0", "--", *command, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert "The program has its batch from conf.yaml:train.batch, so trials set it there." in ended.stderr
    tuned = Tuned(json.loads(ended.stdout), ended.stderr, typed.study, set())
    own = expect_trained_alike(tuned)
    best = tuned.document["best"]
    assert best["micro_batch_size"] > 4
    # The batch of an evaluation has the same name and value.
    assert f"\n-  batch: 4   # rows\n+  batch: {best['micro_batch_size']}   # rows" in own.diff
    assert "eval: {batch: 4}" in own.copies[str(tuned.study.paths.best / "conf.yaml")]
    assert tuned.document["diff"] == own.diff
    assert own.diff in typed.run("show").stdout
    assert (typed.folder / "conf.yaml").read_text() == CONF
    # What ran with the copies runs with the user's own files.
    applied = typed.run("apply", "--backup")
    assert applied.returncode == 0, applied.stderr
    assert own.diff in applied.stdout
    assert (typed.folder / "conf.yaml.before-zerotune").read_text() == CONF
    typed_again = typed.folder / "typed.sh"
    typed_again.write_text(f"cd {typed.folder}\n{' '.join(command)}\n")
    engines = [plain_configuration(typed_again, typed.folder / "engines")]
    copies = json.loads((tuned.study.paths.best / "engines" / "0.json").read_text())
    assert list(differences(copies["zero_config"], engines[0]["zero_config"])) == []
    assert engines[0]["train_batch_size"] == 16
    assert typed.run("apply").returncode == 2


@pytest.mark.long
def test_a_place_that_does_not_hold_the_batch_costs_one_run_and_stays_as_it_is(typed: Zerotune) -> None:
    (typed.folder / "train.py").write_text(TRAIN.replace('settings["batch"]', "4"))
    command = ("deepspeed", "--num_gpus", "1", "train.py", "conf.yaml")
    ended = typed.run("tune", "--json", "--max-trials", "3", "--", *command, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert "The micro-batch was not tuned and stays 4." in ended.stderr
    tuned = Tuned(json.loads(ended.stdout), ended.stderr, typed.study, set())
    assert {each.micro_batch_arrived for each in tuned.completed} == {4}
    assert not [each for each in tuned.results if each.outcome is Outcome.INVALID]
    assert "batch" not in "".join(line for line in expect_trained_alike(tuned).diff.splitlines() if line[:3] == "+  ")


@pytest.mark.long
def test_a_copy_that_the_program_does_not_follow_is_no_answer(typed: Zerotune) -> None:
    # It reads its files by names of its own, whatever is typed.
    code = TRAIN.replace("sys.argv[-1]", "'conf.yaml'").replace(
        'settings["batch"]', "engine.train_micro_batch_size_per_gpu()"
    )
    (typed.folder / "train.py").write_text(code)
    command = ("deepspeed", "--num_gpus", "1", "train.py", "conf.yaml")
    ended = typed.run("tune", "--json", "--max-trials", "3", "-z", "0", "--", *command, timeout=280)
    assert ended.returncode == 0, ended.stderr
    best = typed.study.paths.best_command.read_text()
    assert best.startswith("# This is not the command that you typed, with its files: in a run of it ")
    assert "zero_config.stage is 1, and 0 in the trials" in best
    assert not typed.study.paths.own_command.exists()
    assert json.loads(ended.stdout)["diff"] is None


LOOP = """
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

torch.manual_seed(1)
# On a CPU Accelerate has to be told how its processes talk to each other.
cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
accelerator = Accelerator(kwargs_handlers=cpu)
model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8192, 32)), 4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (inputs,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
ACCELERATE = """\
distributed_type: DEEPSPEED  # on two cores
compute_environment: LOCAL_MACHINE
deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 2}
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


@pytest.mark.long
def test_the_stage_in_accelerates_file_changes_there(typed: Zerotune) -> None:
    pytest.importorskip("accelerate")
    need(2)
    (typed.folder / "acc.yaml").write_text(ACCELERATE)
    (typed.folder / "loop.py").write_text(LOOP)
    command = ("accelerate", "launch", "--config_file", "acc.yaml", "loop.py")
    ended = typed.run("tune", "--json", "--max-trials", "4", "-z", "0", "--", *command, timeout=280)
    assert ended.returncode == 0, ended.stderr
    own = expect_trained_alike(Tuned(json.loads(ended.stdout), ended.stderr, typed.study, set()))
    assert own.applied == command
    if own.diff:
        (copy,) = own.copies.values()
        assert copy.startswith("distributed_type: DEEPSPEED  # on two cores\n")
        assert "zero_stage: 0" in copy


# The frameworks that people type, each in an environment of its own (`make frameworks`).
FRAMEWORKS = Path(os.environ.get("ZEROTUNE_FRAMEWORKS", PROGRAMS.parents[1] / "build" / "frameworks"))
SWIFT = (
    "swift sft --model ./tiny --model_type llama --template dummy --dataset ./messages.jsonl --tuner_type full "
    "--deepspeed zero2 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_steps 60 --max_length 128 "
    "--output_dir out/swift --use_cpu true --torch_dtype float32 --fp16 false --report_to none "
    "--save_strategy no --eval_strategy no --split_dataset_ratio 0"
)
COMMANDS = {
    "trl": "trl sft --config sft.yaml --accelerate_config plugin.yaml",
    "llamafactory": "llamafactory-cli train lf_sft.yaml",
    "swift": SWIFT,
}
ALONE = {
    **{"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    **{"DISABLE_VERSION_CHECK": "1", "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"},
}


@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_frameworks_answer_is_the_command_that_its_users_type(
    tmp_path: Path, home: Path, server: PrefectServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    need(2)
    root = FRAMEWORKS / name
    if not (root / "bin" / "python").exists():
        pytest.skip(f"{name} is not installed in {root} (make frameworks)")
    folder = tmp_path / "program"
    shutil.copytree(PROGRAMS / "frameworks", folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([root / "bin" / "python", "make_model.py"], cwd=folder, check=True, capture_output=True)
    path = os.pathsep.join([str(root / "bin"), os.environ["PATH"]])
    variables = {**ALONE, "TORCH_EXTENSIONS_DIR": str(root / "extensions"), "PATH": path}
    zerotune = Zerotune(tmp_path, home, slots=2)
    zerotune.folder = folder
    zerotune.environment["PREFECT_API_URL"] = server.api_url
    ended = zerotune.start("tune", "--json", "--max-trials", "5", "--", *COMMANDS[name].split(), **variables).follow(
        900
    )
    assert ended.returncode == 0, ended.stderr
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    own = expect_trained_alike(Tuned(json.loads(ended.stdout), ended.stderr, zerotune.study, set()), timeout=300)
    typed = COMMANDS[name].split()
    assert own.words[:2] == tuple(typed[:2])
    if name != "swift":
        assert own.applied == tuple(typed)
        assert "+per_device_train_batch_size: " in own.diff or own.diff == ""
