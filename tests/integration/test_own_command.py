"""The answer in the user's own files: where a value stands is found, and the command trains as the trials did."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from device_fixtures import need
from others_fixtures import Tuned, expect_trained_alike, plain_configuration
from study_fixtures import Zerotune

from benchmarks.programs.frameworks import CASES, differences, study
from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.result import Outcome

pytestmark = pytest.mark.alone

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
    engine = plain_configuration(typed_again, typed.folder / "engines")
    recorded = tuned.study.paths.trial(best["trial"]).engine_built(0)
    assert list(differences(json.loads(recorded.read_text())["engine"], engine)) == []
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


# The frameworks that people type, some in an environment of their own (`make frameworks`).
@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_frameworks_answer_is_what_its_users_type_and_trains_so_without_zerotune(
    tmp_path: Path, home: Path, server: PrefectServer, name: str
) -> None:
    need(2)
    case = CASES[name]
    if not (case.bin / "python").exists():
        pytest.skip(f"{case.title} is not installed in {case.bin.parent} (make frameworks)")
    environment = {**Zerotune(tmp_path, home, slots=2).environment, "PREFECT_API_URL": server.api_url}
    with patch.dict(os.environ, {**environment, **case.shell()}):
        row = study(case, 2, tmp_path)
    assert row["exit_code"] == 0, row["answer"]
    if "gain" in row:
        assert row["engine_differs"] == []
        # Two runs each do not tell a small gain.
        assert row["gain_plainly"]["value"] > 0.9
        assert row["is_own_command"] == (name != "in_code")
        assert row["diff"] or name in ("swift", "hydra")
