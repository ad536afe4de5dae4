"""Keeps a buffer of so many MiB for each sample, for a moment in each forward pass; prints its process id."""

import os
import time

import deepspeed
import torch
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

args = parse_arguments(mib_per_sample=8, only_rank=-1)


class Greedy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if args.only_rank not in (-1, torch.distributed.get_rank()):
            return self.model(inputs)
        buffer = torch.ones(len(inputs) * args.mib_per_sample * 2**18, device=inputs.device)
        time.sleep(0.02)
        return self.model(inputs) + 0.0 * buffer[0]


print(f"pid {os.getpid()}", flush=True)
model = Greedy()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for inputs, labels in batches(engine.train_micro_batch_size_per_gpu(), engine.device):
    engine.backward(F.cross_entropy(engine(inputs), labels))
    engine.step()
