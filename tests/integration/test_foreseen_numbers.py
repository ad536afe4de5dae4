"""Numbers that a foreseen program asks of its tensors: true ones where they follow from the code."""

import json
import os
import sys

import pytest

from trial_lib.foresee.foreseen import Pretended, foresee, starter_for
from trial_lib.launch.program import Program

WORLD = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
# What the program does between two optimizer steps.
TRAINING = """
import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
model = nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
device = engine.device
while True:
    loss = engine(torch.ones(2, 8, device=device)).mean()
    engine.backward(loss)
    engine.step()
    {does}
"""


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    started = starter_for(_program(folder, ""), folder, print)
    yield started
    started.close()


def _program(folder, does):
    (folder / "train.py").write_text(TRAINING.format(does=does or "pass"))
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    return Program(
        interpreter=sys.executable,
        target={"script": "train.py"},
        arguments=["--deepspeed_config", "ds_config.json"],
        passes_local_rank=False,
        model_dir=folder,
        environment=dict(os.environ),
    )


@pytest.fixture
def foreseen(starter, tmp_path):
    def run(does):
        pretended = Pretended(world=WORLD, ranks_per_host=WORLD)
        found = foresee(_program(tmp_path, does), {}, pretended, tmp_path / "run", starter, deadline_s=120.0)
        asked = [each for each in found.asks if "train.py" in each.asker]
        return found.stopped, asked

    return run


@pytest.mark.parametrize(
    "does",
    [
        "assert torch.full((1,), 7, device=device).item() == 7",
        "assert torch.arange(3, 6, device=device).tolist() == [3, 4, 5]",
        "assert torch.zeros_like(model.weight).sum().item() == 0",
        "assert loss.detach().new_ones(3).sum().item() == 3",
        "steps = torch.zeros(4, device=device); steps[1:3].add_(2.0); assert steps.tolist() == [0.0, 2.0, 2.0, 0.0]",
        # Every rank has as many tokens as this one.
        "length = torch.full((1,), 16, device=device); lengths = [torch.zeros_like(length) for _ in range(2)]; "
        "dist.all_gather(lengths, length); assert [each.item() for each in lengths] == [16, 16]",
        "both = torch.zeros(4, dtype=torch.int64, device=device); "
        "dist.all_gather_into_tensor(both, torch.arange(2, device=device)); assert both.tolist() == [0, 1, 0, 1]",
    ],
)
def test_they_are_true_where_they_follow_from_the_code(foreseen, does):
    assert foreseen(does) == ("", [])


@pytest.mark.parametrize(
    "does",
    [
        "torch.full((1,), 7.0, device=device).add_(loss.detach()).item()",
        # The element is a view of the buffer that is asked.
        "losses = torch.zeros(4, device=device); losses[1] = loss.detach(); losses.sum().item()",
        "losses = torch.zeros(4, device=device); part = losses[2:]; losses.add_(loss.detach()); part.sum().item()",
        "losses = torch.zeros(2, device=device); dist.all_gather_into_tensor(losses, loss.detach().reshape(1)); "
        "losses.sum().item()",
        "theirs = torch.zeros(1, device=device); dist.recv(theirs, 1); theirs.item()",
    ],
)
def test_what_training_decides_is_asked_and_recorded(foreseen, does):
    stopped, asked = foreseen(does)
    assert stopped == ""
    assert [each.question for each in asked] == ["item"]
