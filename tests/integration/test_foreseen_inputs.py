"""Data that need a gradient, foreseen: a program on a CPU never moves them to a device."""

import pytest

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
TRAINING = """
import deepspeed
import torch
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.last = torch.nn.Conv2d(8, 1, 1)

    def forward(self, x):
        return self.last(checkpoint(self.first, x, use_reentrant={reentrant})).mean()


model = Model()
engine, *_ = deepspeed.initialize(config="ds_config.json", model=model, model_parameters=model.parameters())
while True:
    {data}
    engine.backward(engine(x))
    assert x.grad.shape == x.shape
    engine.step()
"""
CALLED = "x = torch.randn(2, 3, 16, 16).clone().requires_grad_()"
OTHERS = ["x = torch.randn(2, 3, 16, 16); x.requires_grad = True", "x = torch.randn(2, 3, 16, 16, requires_grad=True)"]


@pytest.mark.parametrize(
    ("data", "reentrant"),
    [(CALLED, False), *(pytest.param(each, True, marks=pytest.mark.long) for each in (CALLED, *OTHERS))],
)
def test_blocks_that_recompute_data_with_a_gradient_are_foreseen(foresee_text, data, reentrant):
    run = foresee_text(TRAINING.format(data=data, reentrant=reentrant), CONFIG)
    assert run.stopped == ""
