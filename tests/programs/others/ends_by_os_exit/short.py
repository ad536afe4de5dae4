"""Ends by `os._exit(0)` after 30 updates, past a thread that runs for ever and past what is registered for the exit."""

import argparse
import atexit
import os
import threading
from pathlib import Path

import deepspeed
import torch
from torch import nn

UPDATES, FEATURES = 30, 192

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
# As a tracker's, that sends what there is to send; it is no daemon.
threading.Thread(target=threading.Event().wait).start()
atexit.register(print, "ended in the usual way")

deepspeed.init_distributed()
torch.manual_seed(4)
model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))
rows = torch.utils.data.TensorDataset(torch.randn(6000, FEATURES))
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=rows
)
micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
print("engine", micro, accumulation, engine.train_batch_size(), flush=True)
while True:
    for (inputs,) in loader:
        inputs = inputs.to(engine.device)
        loss = nn.functional.mse_loss(engine(inputs), inputs)
        engine.backward(loss)
        engine.step()
        if engine.global_steps == UPDATES:
            if engine.global_rank == 0:
                Path("result.txt").write_text(f"{loss.item()}\n")
            torch.distributed.barrier()
            os._exit(0)
