"""Trains a model of no library's, saves or loads a checkpoint, and prints the losses of each step.

Its blocks have a buffer, and the first and the last layer share their weights. --resumes: the folder to load from,
--saves: the folder to save to.
"""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F

VOCABULARY, WIDTH = 64, 32

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--resumes", default="")
parser.add_argument("--saves", default="")
args = deepspeed.add_config_arguments(parser).parse_args()


class Block(torch.nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.relu(self.linear(x))


class Model(torch.nn.Module):
    """Four blocks between a table of words and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(5 if args.resumes else 1)
model = Model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
draws = torch.Generator().manual_seed(7)
first = 0
if args.resumes:
    engine.load_checkpoint(args.resumes)
    first = engine.global_steps
for step in range(6):
    words = torch.randint(0, VOCABULARY, (engine.train_micro_batch_size_per_gpu(), 16), generator=draws)
    if step < first:
        continue
    loss = F.cross_entropy(engine(words.to(engine.device)).flatten(0, 1), words.flatten().to(engine.device))
    engine.backward(loss)
    engine.step()
    print(f"step {step + 1} loss {loss.item():.7f}", flush=True)
    if args.saves and step == 2:
        engine.save_checkpoint(args.saves)
        if engine.zero_optimization_stage() == 3:
            engine.save_16bit_model(args.saves)
        else:
            torch.save(engine.module.state_dict(), Path(args.saves) / f"plain{torch.distributed.get_rank()}.pt")
