"""The training without DeepSpeed beside one with it: real ranks, counted by one counter, on the same samples."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS, Trials
from device_fixtures import TRAINER_FLAGS, need
from study_fixtures import Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.inputs.accelerate import CONFIG_VARIABLE, without_deepspeed
from zerotune.trial_lib.launch.starters import WarmStarter, rank_environment
from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.messages.turned import BESIDE
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult

ANY = PROGRAMS / "any"
FRAMEWORKS = Path(os.environ.get("ZEROTUNE_FRAMEWORKS", PROGRAMS.parents[1] / "build" / "frameworks"))
ALONE = {
    **{"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    "DISABLE_VERSION_CHECK": "1",
}
UNDER_DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no"}
WINDOW = StepWindow(start_step=3, end_step=8, max_steps=6)
BATCH: dict[str, Any] = {"micro_batch": 4, "accumulation": 2, "window": WINDOW, "slots": 2}

TWO_CLOCKS = """
import time
import deepspeed
import torch
from zerotune.trial_lib.messages.measurement import Arrival
from zerotune.trial_lib.rank.device import device_of
from zerotune.trial_lib.rank.without_deepspeed import PlainEngine

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 64))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
plain = PlainEngine(engine, CONFIG)


class Observer:
    def first_batch_arrived(self, sizes, tokens):
        pass

    def optimizer_step_begins(self):
        pass

    def optimizer_step_ended(self, applied):
        seconds = watch.clock.step_ended(watch.parts.take()).seconds()["latency"]
        rows = watch.take_arrived()["rows_in_first"]
        print("plain", seconds, rows, float(watch.take_loss()), flush=True)
        watch.clock.mark()


watch = plain.watched_by(plain, device_of(engine.device), 4, Observer(), with_activations=False, arrival=Arrival())
step = engine.optimizer.step
engine.optimizer.step = lambda *args, **kwargs: plain.step(step, *args, **kwargs)
for _ in range(100):
    for _ in range(2):
        batch = torch.randn(4, 64, device=engine.device)
        engine.backward((engine(batch) - batch).square().mean())
        engine.step()
"""


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 2])
def test_both_counters_agree_on_a_training_with_deepspeed(trials: Trials, tmp_path: Path, stage: int) -> None:
    """The same steps of one process: their seconds, their samples and their losses."""
    folder = tmp_path / "program"
    folder.mkdir()
    optimizer = {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    config = {**sizes, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    (folder / "train.py").write_text(TWO_CLOCKS.replace("CONFIG", repr(config)))
    window = StepWindow(start_step=5, end_step=44, max_steps=40)
    result = trials.run("train.py", model_dir=folder, config_flag="--ignored", **{**BATCH, "window": window})
    assert result.outcome is Outcome.COMPLETED, result.reason
    by_plain = [tuple(map(float, each)) for each in re.findall(r"^plain (\S+) (\S+) (\S+)$", trials.log(result), re.M)]
    counted = by_plain[4:44]
    assert {rows for _, rows, _ in counted} == {8.0}
    assert len(result.step_times) == 40
    # One ends its step within the other's, so single steps differ. The slower rank's are in the record.
    assert sum(seconds for seconds, *_ in counted) == pytest.approx(sum(result.step_times), rel=0.05)
    own_losses = [loss for *_, loss in by_plain[: len(result.losses)]]
    # The record has the mean over two ranks, which draw alike here.
    assert own_losses == pytest.approx(result.losses, rel=1e-5)


def by(kind: str, plan: TrialPlan) -> TrialPlan:
    """The plan of the same training without DeepSpeed."""
    variables = without_deepspeed(plan.program.environment, kind, plan.ds_config, this_host().device == "cpu")
    return replace(plan, program=replace(plan.program, environment=variables), turned={BESIDE[kind]: True})


def expect_alike(
    trials: Trials, plan: TrialPlan, again: TrialPlan, factor: float = 1.0
) -> tuple[TrialResult, TrialResult]:
    """`factor`: by which the losses are larger without DeepSpeed."""
    results = [
        trials.start(each).result() for each in (replace(plan, weighs=True), by("ddp", replace(again, weighs=True)))
    ]
    with_it, without = results
    for result in results:
        assert result.outcome is Outcome.COMPLETED, result.reason
        assert result.micro_batch_arrived == 4
        assert result.metrics["throughput"] * result.metrics["latency"] == pytest.approx(16)
    assert without.losses == pytest.approx([factor * loss for loss in with_it.losses], rel=1e-4)
    assert without.initial_weights == pytest.approx(with_it.initial_weights, rel=1e-6)
    changes = [result.weight_change for result in results]
    assert changes[0] is not None
    assert changes[1] is not None
    for one, other in zip(changes[0].sums, changes[1].sums, strict=True):
        assert other == pytest.approx(one, rel=0.02, abs=1e-4)
    assert min(without.metrics[part] for part in ("forward", "backward", "step")) > 0.0
    return with_it, without


def test_a_trainer_trains_alike_by_ddp_whatever_its_flag_says(trials: Trials, warm_starter: WarmStarter) -> None:
    warm_starter.prime(["transformers", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"])
    options = {"model_dir": ANY, "config_flag": "--deepspeed", "purpose": Purpose.CONFIRM, **BATCH}
    words = ("trainer.py", "--hidden_size", "64", "--dropout", "0", "--max_steps", "30", *TRAINER_FLAGS)
    base = json.loads((ANY / "ds_auto.json").read_text())
    # DeepSpeed's schedule, which the Trainer lacks without it, warms up otherwise.
    del base["scheduler"]
    plans = [trials.plan(*words, zero={"stage": 2}, **options) for _ in range(2)]
    expect_alike(trials, *(replace(plan, ds_config=plan.candidate.complete(base)) for plan in plans))


@pytest.mark.long
def test_a_trainer_trains_alike_by_fsdp2(trials: Trials) -> None:
    """Accelerate has no FSDP on a CPU, so the program gives it there. What it partitions and trains is torch's own."""
    options = {"model_dir": ANY, "config_flag": "--deepspeed", "purpose": Purpose.CONFIRM, **BATCH}
    script = "fsdp_on_cpu.py" if this_host().device == "cpu" else "trainer.py"
    words = (script, "--hidden_size", "64", "--dropout", "0", "--max_steps", "30", *TRAINER_FLAGS)
    base = json.loads((ANY / "ds_auto.json").read_text())
    del base["scheduler"]
    plan, other = (trials.plan(*words, zero={"stage": 3}, **options) for _ in range(2))
    plan, other = (replace(each, ds_config=each.candidate.complete(base), weighs=True) for each in (plan, other))
    with_it, without = (trials.start(each).result() for each in (plan, by("fsdp2", other)))
    for result in (with_it, without):
        assert result.outcome is Outcome.COMPLETED, result.reason
        assert result.metrics["throughput"] * result.metrics["latency"] == pytest.approx(16)
    assert without.losses == pytest.approx(with_it.losses, rel=1e-4)
    # A part would be gathered to be read.
    assert without.weight_change is None


@pytest.mark.long
def test_accelerate_trains_alike_by_ddp(trials: Trials) -> None:
    base = json.loads((ANY / "accelerate_ds.json").read_text())
    plans = []
    for _ in range(2):
        plan = trials.plan("accelerated.py", model_dir=ANY, zero={"stage": 1}, purpose=Purpose.CONFIRM, **BATCH)
        environment = {**rank_environment(), **UNDER_DEEPSPEED, CONFIG_VARIABLE: str(plan.paths.ds_config)}
        program = replace(plan.program, arguments=["--steps", "40"], environment=environment)
        plans.append(replace(plan, program=program, ds_config=plan.candidate.complete(base)))
    expect_alike(trials, *plans)


@pytest.mark.long
def test_lightning_trains_alike_by_ddp(trials: Trials) -> None:
    pytest.importorskip("lightning")
    plans = []
    for _ in range(2):
        plan = trials.plan(
            "train.py", model_dir=PROGRAMS.parents[1] / "examples" / "lightning", purpose=Purpose.CONFIRM, **BATCH
        )
        arguments = ["--batch_size", "4", "--accumulate", "2"]
        plans.append(replace(plan, program=replace(plan.program, arguments=arguments, launched_by="torchrun")))
    # Under DeepSpeed Lightning divides by the accumulation, and so does DeepSpeed.
    expect_alike(trials, *plans, factor=2.0)


# Whole studies


@pytest.fixture
def typed(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    need(2)
    shutil.copytree(ANY, tmp_path / "any", ignore=shutil.ignore_patterns("__pycache__"))
    zerotune = Zerotune(tmp_path, home, slots=2)
    zerotune.folder = tmp_path / "any"
    return zerotune.on_servers(server.api_url, empty_store)


@pytest.mark.long
def test_a_program_that_makes_its_engine_itself_is_refused_before_anything_starts(typed: Zerotune) -> None:
    command = ("deepspeed", "--num_gpus", "2", "raw_flag.py", "--deepspeed_config", "ds_config.json")
    ended = typed.run("tune", "--beside", "ddp,fsdp2", "--", *command)
    assert ended.returncode == 2
    (line,) = (line for line in ended.stderr.splitlines() if "--beside" in line)
    assert "calls deepspeed.initialize itself, so nothing turns DeepSpeed off." in line
    assert not (typed.folder / "zerotune-studies").exists()


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_study_measures_it_in_its_rounds_and_says_how_you_get_it(typed: Zerotune) -> None:
    command = ("accelerate", "launch", "--config_file", "accelerate.yaml", "accelerated.py", "--steps", "400")
    ended = typed.run("tune", "--json", "--max-trials", "3", "--beside", "ddp,fsdp2", "--", *command, timeout=600)
    assert ended.returncode == 0, ended.stderr
    finding = json.loads(ended.stdout)["confirmation"]
    of_ddp = [one for one in finding["beside"] if one["kind"] == "ddp"]
    assert of_ddp[0]["gain"] is not None, finding
    assert len(of_ddp[0]["measured"]["trials"]) >= 3
    assert "agree" in of_ddp[0]["measured"]["losses"]
    assert any("plain DDP" in note.replace("Plain", "plain") for note in finding["notes"])
    of_fsdp2 = [one for one in finding["beside"] if one["kind"] == "fsdp2"]
    if this_host().device == "cpu":
        assert all("Accelerate never does on a CPU" in one["measured"]["reason"] for one in of_fsdp2)
        assert all(len(one["measured"]["trials"]) == 1 for one in of_fsdp2)
    by_torchrun = "ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 accelerated.py in place of `accelerate launch`"
    by_file = "distributed_type: MULTI_GPU in place of DEEPSPEED in accelerate.yaml"
    assert of_ddp[0]["way"].startswith(by_torchrun if this_host().device == "cpu" else by_file)
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS set to that accumulation" in of_ddp[0]["way"]
    shown = typed.run("show").stdout
    assert "ddp-mbs" in shown


# What people type: each framework has an environment of its own (`make frameworks`)
GRPO = (
    "torchrun --nproc_per_node 2 grpo.py --deepspeed ds_z2.json --per_device_train_batch_size 4 --num_generations 2 "
    "--gradient_accumulation_steps 2 --max_completion_length 24 --max_steps 60 --output_dir out --use_cpu true "
    "--bf16 false --report_to none --save_strategy no --logging_steps 50 --steps_per_generation 2"
)


@pytest.fixture
def type_trl(typed: Zerotune, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    root = FRAMEWORKS / "trl"
    if not (root / "bin" / "python").exists():
        pytest.skip(f"trl is not installed in {root} (make frameworks)")
    folder = typed.folder.parent / "program"
    shutil.copytree(PROGRAMS / "frameworks", folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([root / "bin" / "python", "make_model.py"], cwd=folder, check=True, capture_output=True)
    path = os.pathsep.join([str(root / "bin"), os.environ["PATH"]])
    variables = {**ALONE, "TORCH_EXTENSIONS_DIR": str(root / "extensions"), "PATH": path}
    shutil.copy(typed.folder / "mlflow.db", folder)
    typed.folder = folder

    def type_it(*flags: str, command: str) -> dict[str, Any]:
        ended = typed.start("tune", "--json", *flags, "--", *command.split(), **variables).follow(900)
        assert ended.returncode == 0, ended.stderr
        document: dict[str, Any] = json.loads(ended.stdout)
        return document

    return type_it


@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.long
def test_trls_own_program_is_measured_without_deepspeed(type_trl: Callable[..., dict[str, Any]]) -> None:
    command = "trl sft --config sft.yaml --accelerate_config plugin.yaml"
    (first, *_) = type_trl("--max-trials", "3", "--beside", "ddp", command=command)["confirmation"]["beside"]
    assert first["gain"] is not None, first
    assert "agree" in first["measured"]["losses"]
    assert first["way"].startswith("ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 ")
    assert "sft.py in place of `accelerate launch`" in first["way"]


@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.long
def test_reinforcement_learning_is_tuned_by_its_whole_step(type_trl: Callable[..., dict[str, Any]]) -> None:
    found = type_trl("--max-trials", "4", "--vary", "--steps_per_generation=1,2", command=GRPO)
    (own, *_) = (account for account in found["why"] if account["role"] == "own")
    assert own["shares"]["generation"] > 0.2, own
    assert own["shares"]["compute"] > 0.02
    assert own["shares"]["rewards"] > 0
    assert "computation" in own["sentence"]
    assert "generation" in own["sentence"]
    assert found["confirmation"]["winner"] is not None
