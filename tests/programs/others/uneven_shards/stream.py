"""Streams shards of samples, every second one to a rank: of five shards rank 0 has three and rank 1 has two.

Rank 0 makes the shards where there are none. All ranks sum up their rows at the end of an epoch.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

SHARDS, ROWS, FEATURES = 5, 48, 32
FOLDER = Path("rows")


def make_shards() -> None:
    FOLDER.mkdir()
    for number in range(SHARDS):
        torch.save(torch.randn(ROWS, FEATURES), FOLDER / f"part-{number}.pt")


class Rows(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for path in sorted(FOLDER.glob("part-*.pt"))[dist.get_rank() :: dist.get_world_size()]:
            yield from torch.load(path)


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--epochs", type=int, default=4)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
if dist.get_rank() == 0 and not FOLDER.exists():
    make_shards()
dist.barrier()

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, FEATURES))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
micro = engine.train_micro_batch_size_per_gpu()
print("engine", micro, engine.gradient_accumulation_steps(), engine.train_batch_size(), flush=True)
for epoch in range(args.epochs):
    seen = torch.zeros(1, device=engine.device)
    for rows in torch.utils.data.DataLoader(Rows(), micro):
        rows = rows.to(engine.device)
        engine.backward(nn.functional.mse_loss(engine(rows), rows))
        engine.step()
        seen += len(rows)
    dist.all_reduce(seen)
    print(f"epoch {epoch}: {int(seen)} rows", flush=True)
