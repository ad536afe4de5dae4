"""Trains with kernels of Liger and bitsandbytes. Stand-ins for both are beside this file, with triton's."""

import argparse

import bitsandbytes as bnb
import deepspeed
import torch
from liger_kernel.ops import LigerRMSNormFunction, cross_entropy_backward
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = deepspeed.add_config_arguments(parser).parse_args()
HIDDEN, LENGTH = 256, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.frozen = bnb.nn.Linear4bit(HIDDEN, 4 * HIDDEN)
        self.trained = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        return self.trained(self.frozen(LigerRMSNormFunction.apply(x, self.weight, 1e-6)))


assert "cuda" in bnb.supported_torch_devices
model = Model().cuda()
trained = [each for each in model.parameters() if each.requires_grad]
optimizer = bnb.optim.PagedAdamW8bit(trained)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=trained, optimizer=optimizer)
while True:
    x = torch.randn(2, LENGTH, HIDDEN, device=engine.device, dtype=model.weight.dtype)
    loss = engine(x).float().square().mean()
    with torch.no_grad():
        rows, _, outliers = torch.ops.bitsandbytes.int8_vectorwise_quant(model.trained.weight.half(), 6.0)
        torch.ops.bitsandbytes.int8_linear_matmul(rows, rows)
        assert outliers.numel() == 0
    cross_entropy_backward(loss.detach(), loss.detach())
    engine.backward(loss)
    engine.step()
