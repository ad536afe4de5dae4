"""Distils a frozen network into a smaller one; each has an engine, and only the smaller one's has an optimizer."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

FEATURES, CLASSES = 64, 20


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=400)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(2)
frozen, *_ = deepspeed.initialize(
    model=network(512), config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
)
frozen.eval()
small = network(128)
rows = torch.utils.data.TensorDataset(torch.randn(4096, FEATURES))
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=small, model_parameters=small.parameters(), training_data=rows
)
for name, each in (("teacher", frozen), ("engine", engine)):
    batch = (each.train_micro_batch_size_per_gpu(), each.gradient_accumulation_steps(), each.train_batch_size())
    print(name, *batch, flush=True)
    print(f"{name}'s stage {each.zero_optimization_stage()}", flush=True)
steps = 0
while steps < args.steps:
    for (inputs,) in loader:
        inputs = inputs.to(engine.device)
        with torch.no_grad():
            wanted = frozen(inputs).softmax(-1)
        engine.backward(F.kl_div(engine(inputs).log_softmax(-1), wanted, reduction="batchmean"))
        engine.step()
        steps += 1
