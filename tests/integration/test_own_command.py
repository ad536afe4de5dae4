"""The answer in the user's own files: where a value stands is found, and the command trains as the trials did."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import jsonschema
import pytest
import yaml
from device_fixtures import need
from others_fixtures import Tuned, expect_trained_alike
from study_fixtures import Zerotune

from benchmarks.programs.frameworks import CASES, study
from zerotune import api
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
    jsonschema.validate(tuned.document, json.loads(api.schema_text(api.Study)))
    own = expect_trained_alike(tuned)
    best = tuned.document["best"]
    assert best["micro_batch_size"] > 4
    # The batch of an evaluation has the same name and value.
    assert f"\n-  batch: 4   # rows\n+  batch: {best['micro_batch_size']}   # rows" in own.diff
    assert "eval: {batch: 4}" in own.copies[str(tuned.study.paths.best / "conf.yaml")]
    assert tuned.document["diff"] == own.diff
    assert own.diff in typed.run("show").stdout
    assert (typed.folder / "conf.yaml").read_text() == CONF
    # The user's own files have what the copies have that it ran with.
    applied = typed.run("apply", "--backup")
    assert applied.returncode == 0, applied.stderr
    assert own.diff in applied.stdout
    assert (typed.folder / "conf.yaml.before-zerotune").read_text() == CONF
    applied = yaml.safe_load((typed.folder / "conf.yaml").read_text())["train"]
    copied = yaml.safe_load(own.copies[str(tuned.study.paths.best / "conf.yaml")])["train"]
    assert applied == {**copied, "deepspeed": "ds.json"}
    of_both = [json.loads((typed.folder / each["deepspeed"]).read_text()) for each in (applied, copied)]
    assert of_both[0] == of_both[1]
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


# Two places of one name and value, of which a run shows the one that counts: the code that reads them, the words behind
# `train.py`, the files, the place as it is said, the files that are edited, and what is shown of that.
READ = "found = yaml.safe_load(open(sys.argv[-1]))\nconfig = sys.argv[-2]\n"
OPTIONS = """
parser = argparse.ArgumentParser()
for name in ("--local_rank", "--deepspeed_config", "--config", "--ref"):
    parser.add_argument(name)
parser.add_argument("--batch", type=int)
args = parser.parse_args()
config = args.deepspeed_config
found = yaml.safe_load(open(args.config or args.ref))
"""
BASES = """
def load(path):
    own = yaml.safe_load(path.read_text())
    base = own.pop("base", None)
    return {**(load(path.parent / base) if base else {}), **own}

found = load(Path(sys.argv[-1]))
config = sys.argv[-2]
"""
TWO_STAGES = """
found = yaml.safe_load(open(sys.argv[-1]))
config = {**json.load(open("ds.json")), "zero_optimization": {"stage": found["zero"]["stage"]}}
config["gradient_accumulation_steps"] = found["train"]["accumulation"]
"""
REST = """
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(400):
    loss = engine(torch.randn(batch, 32, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
"""
OPTION = "--deepspeed_config ds.json --config conf.yaml --batch 4"
FLAT = {"conf.yaml": "model: {width: 512}\nbatch: 4\n"}
DOUBLES = {
    "a shadowed key": (
        f"{READ}batch = {{**found['defaults'], **found['train']}}['batch']",
        "ds.json conf.yaml",
        {"conf.yaml": "defaults: {batch: 4, seed: 1}\ntrain:\n  batch: 4  # rows\n"},
        "conf.yaml:train.batch",
        "ds.json conf.yaml",
        ["-  batch: 4  # rows", "+  batch: {size}  # rows"],
    ),
    "a section of another name": (
        f"{READ}batch = found['train']['batch']",
        "ds.json conf.yaml",
        {"conf.yaml": "dev: {batch: 4}\ntrain: {batch: 4}\n"},
        "conf.yaml:train.batch",
        "ds.json conf.yaml",
        ["-train: {batch: 4}", "+train: {batch: {size}}"],
    ),
    "an option over a file": (
        f"{OPTIONS}batch = args.batch or found['batch']",
        OPTION,
        FLAT,
        "--batch",
        "ds.json",
        ["--config conf.yaml --batch {size}"],
    ),
    "a file over an option": (
        f"{OPTIONS}batch = found['batch'] or args.batch",
        OPTION,
        FLAT,
        "conf.yaml:batch",
        "ds.json conf.yaml",
        ["-batch: 4", "+batch: {size}"],
    ),
    "a variable over both": (
        f"{OPTIONS}batch = int(os.environ.get('BATCH') or args.batch or found['batch'])",
        OPTION,
        FLAT,
        "BATCH",
        "ds.json",
        ["BATCH={size} deepspeed"],
    ),
    "a base": (
        f"{BASES}batch = found['batch']",
        "ds.json conf/run.yaml",
        {"conf/run.yaml": "base: base.yaml\nseed: 1\n", "conf/base.yaml": "batch: 4\nseed: 0\n"},
        "conf/run.yaml:+batch",
        "ds.json conf/run.yaml",
        ["+batch: {size}"],
    ),
    "a file with a base": (
        f"{BASES}batch = found['batch']",
        "ds.json conf/run.yaml",
        {"conf/run.yaml": "base: base.yaml\nbatch: 4\n", "conf/base.yaml": "seed: 0\n"},
        "conf/run.yaml:batch",
        "ds.json conf/run.yaml",
        ["-batch: 4", "+batch: {size}"],
    ),
    "another model's configuration": (
        f"{OPTIONS}batch = json.load(open(config))['train_micro_batch_size_per_gpu']",
        "--ref ref.json --deepspeed_config ds.json",
        {"ref.json": json.dumps(OWN)},
        "",
        "ds.json",
        ['-  "train_micro_batch_size_per_gpu": 4,', '+  "train_micro_batch_size_per_gpu": {size},'],
    ),
    "a stage of something else": (
        f"{TWO_STAGES}batch = config['train_micro_batch_size_per_gpu'] = found['train']['batch']",
        "conf.yaml",
        {"conf.yaml": "curriculum: {stage: 1}\nzero: {stage: 1}\ntrain: {batch: 4, accumulation: 4}\n"},
        "conf.yaml:train.batch",
        "conf.yaml",
        ["-zero: {stage: 1}", "+zero: {stage: 0}", "-train: {batch: 4, accumulation: 4}"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", DOUBLES)
def test_of_two_places_that_are_alike_a_run_shows_the_one_that_counts(typed: Zerotune, kind: str) -> None:
    code, words, files, place, edited, shown = DOUBLES[kind]
    head = "import argparse, json, os, sys\nfrom pathlib import Path\nimport deepspeed\nimport torch\nimport yaml\n"
    (typed.folder / "train.py").write_text(f"{head}{code}\n{REST}")
    for name, text in files.items():
        (typed.folder / name).parent.mkdir(exist_ok=True)
        (typed.folder / name).write_text(text)
    command = ("deepspeed", "--num_gpus", "1", "train.py", *words.split())
    variables = {"BATCH": "4"} if place == "BATCH" else {}
    ended = typed.run("tune", "--json", "--max-trials", "3", "-z", "0", "--", *command, timeout=280, **variables)
    assert ended.returncode == 0, ended.stderr
    tuned = Tuned(json.loads(ended.stdout), ended.stderr, typed.study, set())
    size = tuned.document["best"]["micro_batch_size"]
    assert size > 4
    assert not place or f"The program has its batch from {place}, so trials set it there." in ended.stderr
    own = expect_trained_alike(tuned)
    answer = f"{own.diff}\n{tuned.best_command}"
    assert [each for each in shown if each.replace("{size}", str(size)) not in answer] == [], answer
    names = [line.removeprefix("+++ ") for line in own.diff.splitlines() if line.startswith("+++ ")]
    assert sorted(names) == sorted(edited.split())


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
        # A trial class does not train without ZeroTune.
        row = study(case, 0 if name == "trial_class" else 2, tmp_path)
    assert row["exit_code"] == 0, row["answer"]
    if "gain_plainly" in row:
        assert row["engine_differs"] == []
        # Two runs each do not tell a small gain.
        assert row["gain_plainly"]["value"] > 0.9
    if "gain" in row:
        assert row["is_own_command"] == (name != "in_code")
        assert row["diff"] or name in ("swift", "hydra") or "+++ train.py" in row["best"]
