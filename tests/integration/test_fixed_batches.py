"""Programs that feed batches of one size, whatever a trial asks for: everything else is tuned."""

import json
import subprocess
from pathlib import Path

import pytest
from others_fixtures import Triple, Tuned, engine_of, expect_trained_alike, stage_of
from study_fixtures import Study, Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# As GPT-NeoX's `deepy.py`: one YAML becomes two words in base64, and DeepSpeed's launcher is called as a function.
DEEPY = """
import base64
import json
import sys
import yaml
from deepspeed.launcher import runner

def word(settings):
    return base64.urlsafe_b64encode(json.dumps(settings).encode()).decode()

with open(sys.argv[1]) as file:
    settings = yaml.safe_load(file)
of_deepspeed = {key: value for key, value in settings.items() if key != "width"}
words = ["--deepspeed_config", word(of_deepspeed), "--neox_config", word(settings)]
runner.main(["--num_gpus", "2", "--master_port", "29571", "train.py", *words])
"""
TRAIN = """
import argparse
import base64
import json
import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed_config", required=True)
parser.add_argument("--neox_config")
parser.add_argument("--rows", type=int, default=0)
args = parser.parse_args()
config = args.deepspeed_config
if args.neox_config:
    config = json.loads(base64.urlsafe_b64decode(config))
    args.rows = json.loads(base64.urlsafe_b64decode(args.neox_config))["train_micro_batch_size_per_gpu"]
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
sizes = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), engine.train_batch_size()
print("engine", *sizes, flush=True)
for _ in range(400):
    loss = engine(torch.randn(args.rows or 1, 32, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
"""
OWN = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


@pytest.fixture
def typed(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    """Where the command is typed, beside the two programs."""
    found = Zerotune(tmp_path, home, slots=2).on_servers(server.api_url, empty_store)
    (tmp_path / "deepy.py").write_text(DEEPY)
    (tmp_path / "train.py").write_text(TRAIN)
    return found


def expect_tuned_at(size: Triple, ended: subprocess.CompletedProcess[str], study: Study) -> str:
    """Checks that other settings were measured at the program's own batch alone. Returns the sentence about it."""
    assert ended.returncode == 0, ended.stderr
    measured = [each for each in study.results.values() if each.outcome is Outcome.COMPLETED]
    assert {engine_of(each) for each in measured if each.purpose is not Purpose.PROFILE} == {size}
    assert len({stage_of(each) for each in measured}) > 1
    (said,) = (note for note in json.loads(ended.stdout)["confirmation"]["notes"] if "was not tuned" in note)
    assert said.startswith(f"The micro-batch was not tuned and stays {size[0]}.")
    return str(said)


def test_a_size_in_another_word_of_the_launch_stays_and_all_else_is_tuned(typed: Zerotune) -> None:
    # The command does not name the file.
    (typed.folder / "small.yml").write_text(json.dumps({"width": 512, **OWN}))
    (typed.folder / "deepy.py").write_text(DEEPY.replace("sys.argv[1]", "'small.yml'"))
    command = ("tune", "--json", "--max-trials", "5", "--", "python", "./deepy.py")
    said = expect_tuned_at((4, 2, 16), typed.run(*command, timeout=400), typed.study)
    assert "train_micro_batch_size_per_gpu 4 in the base64 of --neox_config, which no trial changes" in said
    assert "engine.train_micro_batch_size_per_gpu()" in said


def test_a_size_in_a_file_that_only_the_wrapper_reads_is_tuned_by_starting_it_from_copies(typed: Zerotune) -> None:
    file = typed.folder / "small.yml"
    file.write_text(json.dumps({"width": 512, **OWN}))
    ended = typed.run("tune", "--json", "--max-trials", "5", "--", "python", "./deepy.py", "small.yml", timeout=400)
    assert ended.returncode == 0, ended.stderr
    assert "The program has its batch from small.yml:train_micro_batch_size_per_gpu" in ended.stderr
    assert json.loads(file.read_text()) == {"width": 512, **OWN}
    measured = [each for each in typed.study.results.values() if each.outcome is Outcome.COMPLETED]
    sizes = {engine_of(each) for each in measured if each.purpose is not Purpose.PROFILE}
    assert (4, 2, 16) in sizes
    assert len(sizes) > 1
    assert {total for *_, total in sizes} == {16}
    assert "was not tuned" not in ended.stdout
    tuned = Tuned(json.loads(ended.stdout), ended.stderr, typed.study, set())
    assert expect_trained_alike(tuned).applied[-2:] == ("./deepy.py", "small.yml")


def test_a_single_row_whatever_is_asked_costs_no_trial(typed: Zerotune) -> None:
    (typed.folder / "ds.json").write_text(json.dumps({**OWN, "train_micro_batch_size_per_gpu": 1}))
    program = ("deepspeed", "--num_gpus", "2", "train.py", "--deepspeed_config", "ds.json")
    ended = typed.run("tune", "--json", "--free-batch", "--max-trials", "6", "--", *program, timeout=400)
    expect_tuned_at((1, 2, 4), ended, typed.study)
    assert Outcome.INVALID not in {each.outcome for each in typed.study.results.values()}
