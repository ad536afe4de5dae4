"""A program typed at a micro-batch of 1: a run at 2, to its first batch, finds where it has the size."""

import json
import logging
import os
import sys
import time
from pathlib import Path

import pytest
from others_fixtures import Tuned, expect_trained_alike
from study_fixtures import Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.launch.trial import ThisHost
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.followed import followed
from zerotune.trial_lib.study.runner import Work
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.typed_command import read_command

TRAIN = """
import argparse
import json
import pathlib
import deepspeed
import torch
import yaml

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed_config", default="ds.json")
parser.add_argument("--config")
for name in ("--batch-size", "--epochs", "--layers"):
    parser.add_argument(name, type=int, default=1)
args = parser.parse_args()
rows = args.batch_size
if args.config:
    text = pathlib.Path(args.config).read_text()
    rows = yaml.safe_load(text)["train"]["batch"]
torch.manual_seed(1)
layers = [torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1)]
model = torch.nn.Sequential(*layers)
config = json.loads(pathlib.Path(args.deepspeed_config).read_text())
config["train_micro_batch_size_per_gpu"] = config["train_micro_batch_size_per_gpu"] or rows
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(args.epochs * 400):
    loss = engine(torch.randn(rows, 32, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
"""
HYDRA = """
import deepspeed
import hydra
import torch

@hydra.main(version_base=None, config_path=".", config_name="conf")
def main(settings):
    model = torch.nn.Linear(32, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
    for _ in range(400):
        loss = engine(torch.randn(settings.data.batch, 32, device=engine.device)).square().mean()
        engine.backward(loss)
        engine.step()

main()
"""
OWN = {
    MICRO_BATCH: 1,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
CONF = "train: {batch: 1, epochs: 1, layers: 1}\neval: {batch: 1}\nseed: 1\nlr: 1\n"
LAUNCH = """
rows=1
sed "s/MICRO/$rows/" template.json > made.json
deepspeed --num_gpus 1 --master_port 29573 train.py --batch-size $rows --epochs 1 --deepspeed_config made.json
"""
DEFAULT = "deepspeed --num_gpus 1 --master_port 29574 train.py --batch-size ${MBS:-4} --deepspeed_config ds.json\n"
FILE = "--deepspeed_config ds.json"
TRAINS = f"deepspeed --num_gpus 1 train.py {FILE}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is typed, beside its program and files."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "by_hydra.py").write_text(HYDRA)
    (tmp_path / "ds.json").write_text(json.dumps(OWN))
    (tmp_path / "template.json").write_text(json.dumps({**OWN, MICRO_BATCH: "MICRO"}).replace('"MICRO"', "MICRO"))
    (tmp_path / "conf.yaml").write_text(CONF)
    (tmp_path / "launch.sh").write_text(LAUNCH)
    (tmp_path / "default.sh").write_text(DEFAULT)
    return tmp_path


@pytest.fixture
def typed(folder: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    return Zerotune(folder, home).on_servers(server.api_url, empty_store)


def driver_of(command: str, folder: Path, starter: WarmStarter) -> StudyDriver:
    host = this_host()
    found = followed(command.split(), folder, lambda sentence: None)
    paths = StudyPaths(folder / "study")
    paths.trials.mkdir(parents=True)
    arguments = StudyArguments(command=found.words, model_dir=folder, start_profile_step=1, end_profile_step=1)
    experiment = read_command(found.words, {}, folder, host, wrapper=found.wrapper)
    setup = StudySetup.now("study", time.time(), experiment, arguments, paths, host)
    return StudyDriver(setup, ThisHost(starter, host, folder / "locks"), logging.getLogger("test.typed_at_one"))


def ended(driver: StudyDriver, work: Work) -> TrialResult:
    (result,) = driver.run(work)
    assert isinstance(result, TrialResult)
    driver.tell(result)
    return result


def profile_of(driver: StudyDriver) -> TrialResult:
    plan = driver.profile_plan()
    assert plan is not None
    return ended(driver, Work((plan,)))


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (f"{TRAINS} --batch-size 1 --epochs 1 --layers 1", "--batch-size"),
        pytest.param(f"{TRAINS} --epochs 1", "--batch-size", marks=pytest.mark.long),
        (f"{TRAINS} --epochs 1 --config conf.yaml", "conf.yaml:train.batch"),
        ("bash launch.sh", "--batch-size"),
        pytest.param("python by_hydra.py +x=1", "data.batch", marks=pytest.mark.long),
    ],
)
def test_the_place_of_the_size_is_found_and_the_profile_stays_that_of_one_sample(
    folder: Path, warm_starter: WarmStarter, command: str, place: str
) -> None:
    if "hydra" in command:
        pytest.importorskip("hydra", reason="a Hydra program needs hydra-core")
        (folder / "conf.yaml").write_text("eval: {batch: 1}\ncache: {batch: 1}\ndata: {batch: 1}\nseed: 1\n")
    driver = driver_of(command, folder, warm_starter)
    profile = profile_of(driver)
    assert profile.outcome is Outcome.COMPLETED, profile.reason
    assert profile.program is not None
    assert profile.program.arg_mappings == {MICRO_BATCH: place}, profile.program.fixed_batch
    assert profile.note == f"The program has its batch from {place}, so trials set it there."
    assert profile.micro_batch_arrived == driver.state.candidates[0].micro_batch_size == 1
    assert profile.profile is not None
    # It ended as its first batch arrived.
    begun = TrialResult.from_text(driver.setup.paths.trial(0).larger.result.read_text())
    assert (begun.outcome, begun.metrics, "first_step" in begun.phases) == (Outcome.COMPLETED, {}, False)
    result = ended(driver, Work((driver.plan_again(Purpose.CONFIRM, Candidate(micro_batch_size=3)),)))
    assert (result.outcome, result.micro_batch_arrived) == (Outcome.COMPLETED, 3), result.reason


@pytest.mark.long
def test_a_script_and_a_template_of_a_launcher_are_tuned_whole(typed: Zerotune) -> None:
    """The script has the size for its option and for the JSON that it makes."""
    ended = typed.run("micro-batch", "--json", "--max-trials", "6", "--", "bash", "launch.sh")
    assert ended.returncode == 0, ended.stderr
    assert "The program has its batch from --batch-size, so trials set it there." in ended.stderr
    tuned = Tuned(json.loads(ended.stdout), ended.stderr, typed.study, set())
    assert {each.outcome for each in tuned.results} == {Outcome.COMPLETED}
    sizes = {each.micro_batch_arrived for each in tuned.results}
    assert min(sizes) == 1
    assert len(sizes) > 2
    assert "was not tuned" not in ended.stdout
    assert "--batch-size" in tuned.best_command


@pytest.mark.long
def test_a_default_of_a_launchers_variable_is_tuned(typed: Zerotune) -> None:
    (typed.folder / "ds.json").write_text(json.dumps({**OWN, MICRO_BATCH: None}))
    ended = typed.run("micro-batch", "--json", "--max-trials", "7", "--", "bash", "default.sh")
    assert ended.returncode == 0, ended.stderr
    tuned = Tuned(json.loads(ended.stdout), ended.stderr, typed.study, set())
    own = expect_trained_alike(tuned)
    best = tuned.document["best"]["micro_batch_size"]
    assert best > 4
    assert own.variables["MBS"] == str(best)
    assert own.words == ("bash", "default.sh")
