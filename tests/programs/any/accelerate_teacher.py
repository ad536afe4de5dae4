"""Distils a frozen teacher into a student with Accelerate, each with DeepSpeed settings of its own.

--first: whose settings are made first.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--first", choices=["student", "teacher"], default="student")
arguments = parser.parse_args()

CONFIGS = {
    "student": {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
    },
    "teacher": {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 0},
    },
}
order = sorted(CONFIGS, key=lambda name: name != arguments.first)
accelerator = Accelerator(
    deepspeed_plugins={name: DeepSpeedPlugin(hf_ds_config=CONFIGS[name]) for name in order},
    # On a CPU Accelerate has to be told how its processes talk to each other.
    kwargs_handlers=[] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")],
)
data = TensorDataset(torch.randn(10_000, 16), torch.zeros(10_000))
accelerator.state.select_deepspeed_plugin("student")
model = nn.Linear(16, 8)
optimizer, loader = torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=arguments.batch_size)
student, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.state.select_deepspeed_plugin("teacher")
teacher = accelerator.prepare(nn.Linear(16, 8))
teacher.eval()
accelerator.state.select_deepspeed_plugin("student")
for name, engine in (("student", student), ("teacher", teacher)):
    print(f"{name}: stage {engine.zero_optimization_stage()}, {engine.train_micro_batch_size_per_gpu()} samples")
print(f"accumulation: {accelerator.gradient_accumulation_steps}", flush=True)
for inputs, _ in loader:
    with accelerator.accumulate(student):
        with torch.no_grad():
            soft = F.softmax(teacher(inputs), -1)
        accelerator.backward(F.kl_div(F.log_softmax(student(inputs), -1), soft, reduction="batchmean"))
        optimizer.step()
        optimizer.zero_grad()
