"""Two networks with an engine each, one of which learns through the other, at stages that divide gradients."""

import pytest

GAN = """
import deepspeed
import torch
from torch import nn
from torch.nn import functional


def engine(*sizes):
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.LeakyReLU(0.2), nn.Linear(sizes[1], sizes[2]))
    return deepspeed.initialize(config="ds_config.json", model=model, model_parameters=model.parameters())[0]


maker, judge = engine(4, 64, 2), engine(2, 64, 1)
while True:
    real = torch.randn(8, 2, device=maker.device, dtype=torch.bfloat16)
    made = maker(torch.randn(8, 4, device=maker.device, dtype=torch.bfloat16))
    judged_real, judged_made = judge(torch.cat([real, made.detach()])).chunk(2)
    judge.backward(functional.softplus(-judged_real).mean() + functional.softplus(judged_made).mean())
    judge.step()
    judge.module.requires_grad_(False)
    maker.backward(functional.softplus(-judge.module(made)).mean())
    maker.step()
    judge.module.requires_grad_(True)
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_network_learns_through_another_one_that_must_not(foresee_text, stage):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    run = foresee_text(GAN, config)
    assert run.stopped == ""
    assert run.stage == stage
    assert {each.apart for each in run.operations if each.ranks > 1} == {1}
