"""Trains with Accelerate, and says what batch its engine has; IN_CODE has the accumulation stand in the code."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
batch = parser.parse_args().batch
plugin = DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=2) if "IN_CODE" in os.environ else None
cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=cpu)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.ones(1000, 4), batch_size=batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
own = (model.train_micro_batch_size_per_gpu(), model.gradient_accumulation_steps(), model.train_batch_size())
print("engine", *own, flush=True)
for _ in range(int(os.environ.get("EPOCHS", "1000"))):
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
