"""A tool with subcommands: `fit` trains with a batch that stands in the environment, and a stage of its own option."""

import argparse
import os

import deepspeed
import torch
from torch import nn

FEATURES = 96


def fit(options: argparse.Namespace) -> None:
    deepspeed.init_distributed()
    batch, accumulation = int(os.environ["BATCH"]), int(os.environ.get("ACCUM", "1"))
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "torch_adam": True}},
        "zero_optimization": {"stage": options.zero},
    }
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(FEATURES, 3 * FEATURES), nn.SiLU(), nn.Linear(3 * FEATURES, FEATURES))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    own = (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), engine.train_batch_size())
    print("engine", *own, flush=True)
    for _ in range(options.micro_steps):
        rows = torch.randn(batch, FEATURES).to(engine.device)
        engine.backward(nn.functional.l1_loss(engine(rows), rows.flip(-1)))
        engine.step()


def score(options: argparse.Namespace) -> None:
    raise SystemExit("There is nothing to score yet: run `fit` first.")


parser = argparse.ArgumentParser()
parser.add_argument("-v", action="store_true")
commands = parser.add_subparsers(required=True)
fits = commands.add_parser("fit")
fits.set_defaults(run=fit)
fits.add_argument("--lr", type=float, default=1e-3)
fits.add_argument("--zero", type=int, default=0, choices=range(4))
fits.add_argument("--micro-steps", type=int, default=400)
commands.add_parser("score").set_defaults(run=score)
arguments = parser.parse_args()
arguments.run(arguments)
