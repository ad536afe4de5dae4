"""Trains from a data loader, and prints how each batch was loaded, and the loss.

A batch is 2 of 8 samples, so every fourth step ends an epoch. `makers` are the processes that have made samples so far.
"""

import argparse
import os
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--epochs", type=int, default=60)
args = deepspeed.add_config_arguments(parser).parse_args()


class Places(Dataset[torch.Tensor]):
    """Samples that show the process that has made them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor([place, os.getpid()])


torch.manual_seed(3)
model = torch.nn.Linear(1, 1)
adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=adam)
loader: Any = DataLoader(Places(), batch_size=engine.train_micro_batch_size_per_gpu())
step, makers = 0, set()
for _ in range(args.epochs):
    for batch in loader:
        step += 1
        makers |= set(batch[:, 1].tolist())
        elsewhere = os.getpid() not in batch[:, 1]
        places = batch[:, :1].float().to(engine.device)
        loss = engine(places / 8).sum()
        engine.backward(loss)
        engine.step()
        read = f"workers {loader.num_workers} prefetch {loader.prefetch_factor} pinned {loader.pin_memory}"
        stay = f"persistent {loader.persistent_workers} elsewhere {elsewhere} makers {len(makers)}"
        fused = f"fused {adam.defaults['fused']}"
        print(f"step {step} {read} {stay} {fused} loss {loss.item():.6f}", flush=True)
