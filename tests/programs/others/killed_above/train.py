"""Trains a small network. Above 8 samples its second rank is killed without a word, as by a kernel short of memory."""

import argparse
import os
import subprocess

import deepspeed
import torch
from torch import nn

FEATURES, CLASSES, LARGEST = 256, 10, 8

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, CLASSES))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
micro = engine.train_micro_batch_size_per_gpu()
print("engine", micro, engine.gradient_accumulation_steps(), engine.train_batch_size(), flush=True)
draws = torch.Generator().manual_seed(engine.global_rank)
for step in range(400):
    if micro > LARGEST and step == 3 and engine.global_rank == 1:
        # Another process sends it, as the kernel does.
        subprocess.run(["kill", "-9", str(os.getpid())], check=False)
    rows = torch.randn(micro, FEATURES, generator=draws).to(engine.device)
    loss = nn.functional.cross_entropy(engine(rows), rows[:, :CLASSES].argmax(1))
    engine.backward(loss)
    engine.step()
