"""Trains a small language model with Accelerate; `accelerate launch` and its configuration say how."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from stopwatch import Stopwatch
from torch.utils.data import DataLoader

from model import LanguageModel, Sentences

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--learning_rate", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output_dir", default=None)
arguments = parser.parse_args()

# On a CPU Accelerate has to be told how its processes talk to each other.
cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
accelerator = Accelerator(kwargs_handlers=cpu)
model = LanguageModel()
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate),
    DataLoader(Sentences(), batch_size=arguments.per_device_train_batch_size, shuffle=True),
)

stopwatch, steps, samples = Stopwatch(), 0, 0
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    samples += len(batch)
    if accelerator.sync_gradients:
        stopwatch.step(samples)
        steps, samples = steps + 1, 0
    if steps == arguments.steps:
        break
stopwatch.report()
if arguments.output_dir:
    accelerator.save_state(arguments.output_dir)
