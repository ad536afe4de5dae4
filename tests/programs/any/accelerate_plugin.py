"""Trains a small language model with Accelerate, whose DeepSpeed settings stand in the code."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from stopwatch import Stopwatch
from torch.utils.data import DataLoader

from model import LanguageModel, Sentences

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--steps", type=int, default=30)
arguments = parser.parse_args()

accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2, gradient_clipping=1.0),
    # On a CPU Accelerate has to be told how its processes talk to each other.
    kwargs_handlers=[] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")],
)
model = LanguageModel()
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    DataLoader(Sentences(), batch_size=arguments.batch_size, shuffle=True),
)

stopwatch, steps = Stopwatch(), 0
while steps < arguments.steps:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            stopwatch.step(len(batch) * accelerator.gradient_accumulation_steps)
            steps += 1
        if steps == arguments.steps:
            break
stopwatch.report()
