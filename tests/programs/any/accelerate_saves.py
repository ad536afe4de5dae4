"""Trains with Accelerate, and writes a great deal: checkpoints, the model, a tracker's log."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.data import DataLoader

from model import LanguageModel, Sentences

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=30)
arguments = parser.parse_args()
checkpoint = str(arguments.output_dir / "checkpoint")

cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
accelerator = Accelerator(
    log_with="tensorboard", project_dir=str(arguments.output_dir), gradient_accumulation_steps=3, kwargs_handlers=cpu
)
accelerator.init_trackers("my_project", config={"steps": arguments.steps})
model = LanguageModel()
loader = DataLoader(Sentences(), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
if Path(checkpoint).exists():
    accelerator.load_state(checkpoint)

steps = 0
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        steps += 1
        accelerator.log({"loss": loss.item()}, step=steps)
        print("saved in", accelerator.save_state(checkpoint), flush=True)
        accelerator.save_model(model, str(arguments.output_dir / "model"))
    if steps == arguments.steps:
        break
accelerator.end_training()
