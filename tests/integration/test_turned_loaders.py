"""A program's data loader and its Adam: what the profile trial finds out, and what a trial turns."""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import pytest
from conftest import Trials

from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.messages.orders import StepWindow, TrainingOrder
from zerotune.trial_lib.messages.turned import FUSED, PINNED, WORKERS
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import TrialResult

OWN = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
PROGRAM = """
import json, os, time
import deepspeed, torch
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, place):
        time.sleep({seconds})
        return torch.tensor([place, os.getpid(), 1, 1]) {noise}

torch.manual_seed(3)
model = torch.nn.Linear(4, 1)
adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=json.load(open("own.json")))
loader = DataLoader(Images(), batch_size=engine.train_micro_batch_size_per_gpu(), shuffle=True)
for images in loader:
    elsewhere = bool((images[:, 1] != os.getpid()).all())
    print("fused", adam.defaults["fused"], "elsewhere", elsewhere, "places", images[:, 0].tolist(), flush=True)
    time.sleep(0.005)
    images[:, 1] = 1
    engine.backward(engine(images / 400).sum())
    engine.step()
"""


class Run(Protocol):
    """Runs a program whose data set takes so many seconds for a sample; as typed if nothing is turned."""

    def __call__(self, seconds: float, noise: str = "", **turned: Any) -> TrialResult: ...


@pytest.fixture
def run(trials: Trials, tmp_path: Path) -> Run:
    def run_trial(seconds: float, noise: str = "", **turned: Any) -> TrialResult:
        (tmp_path / "own.json").write_text(json.dumps(OWN))
        (tmp_path / "train.py").write_text(PROGRAM.format(seconds=seconds, noise=noise))
        window, purpose = StepWindow(1, 4, max_steps=4), Purpose.SEARCH
        if not turned:
            window, purpose = StepWindow(1, 1, max_steps=1), Purpose.PROFILE
        plan = trials.plan("train.py", model_dir=tmp_path, config_flag="--any", window=window, purpose=purpose)
        candidate = Candidate(micro_batch_size=2)
        plan = dataclasses.replace(plan, candidate=candidate, as_typed=not turned, turned=turned)
        result = trials.start(plan).result()
        assert result.outcome == "completed", result.reason
        return result

    return run_trial


def program_of(result: TrialResult) -> ProgramProfile:
    assert result.program is not None
    return result.program


def test_a_slow_loader_shows_its_share_and_its_line(run: Run) -> None:
    program = program_of(run(seconds=0.02, noise="+ torch.rand(4)"))
    loading = program.loading
    assert loading is not None
    assert 0.5 < loading.share < 1.0
    assert (loading.num_workers, loading.prefetch_factor, loading.cores) == (0, None, 1)
    assert loading.refusal == ""
    assert loading.made_at == "train.py:18"
    assert not loading.by_trainer
    assert program.turnable[FUSED] == [True, False]
    assert program.turnable[WORKERS] == [0, 1]
    assert "accelerator" in program.not_turnable[PINNED]


@pytest.mark.long
def test_a_quick_loader_shows_a_small_share(run: Run) -> None:
    loading = program_of(run(seconds=0.0)).loading
    assert loading is not None
    assert loading.share < 0.4


SHOWN = re.compile(r"fused (\w+) elsewhere (\w+) places (.+)")


def test_a_trial_turns_both_and_the_samples_and_losses_stay(run: Run) -> None:
    own = run(seconds=0.0, **{FUSED: True})
    turned = run(seconds=0.0, **{FUSED: False, WORKERS: 1})
    shown, others = (SHOWN.findall(Path(each.logs[0]).read_text()) for each in (own, turned))
    assert {line[:2] for line in shown} == {("True", "False")}
    assert {line[:2] for line in others} == {("None", "True")}
    shared = min(len(shown), len(others))
    assert shared >= 4
    assert [line[2] for line in shown[:shared]] == [line[2] for line in others[:shared]]
    assert turned.losses == pytest.approx(own.losses[: len(turned.losses)], rel=1e-5)


TRAINED = """
import os, torch
from torch.utils.data import DataLoader, Dataset

class Places(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        return torch.tensor([place, os.getpid()])

adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
rows = [row for batch in DataLoader(Places(), batch_size=2) for row in batch.tolist()]
print("fused", adam.defaults["fused"], "elsewhere", all(pid != os.getpid() for _, pid in rows), [p for p, _ in rows])
"""


@pytest.mark.parametrize(
    ("turned", "said"), [({}, "None elsewhere False"), ({WORKERS: 1, FUSED: True}, "True elsewhere True")]
)
@pytest.mark.long
def test_a_training_at_full_length_has_what_the_trials_had(turned: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINED)
    order = TrainingOrder(
        program={"script": str(tmp_path / "train.py")},
        local_rank_option="",
        arguments=[],
        ds_config={},
        is_in_code=False,
        turned=turned,
        device=None,
        finished=[str(tmp_path / "finished")],
        failures=[str(tmp_path / "failure")],
    )
    code = "import json, sys; from zerotune.trial_lib.rank.rank import train; train(json.loads(sys.argv[1]), 0)"
    command = [sys.executable, "-c", code, json.dumps(asdict(order))]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"fused {said} [0, 1, 2, 3]" in ended.stdout
