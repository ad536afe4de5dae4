"""A small model and endless data, for the programs beside it."""

import argparse
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F

FEATURES, CLASSES = 24, 8


def parse_arguments(**options: Any) -> argparse.Namespace:
    """Reads the command line: DeepSpeed's flags, and an option for each keyword with its default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=1000)
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return deepspeed.add_config_arguments(parser).parse_args()


def small_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))


def batches(size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.randn(size, FEATURES).to(device), torch.randint(0, CLASSES, (size,)).to(device)


def train(engine: Any, steps: int) -> None:
    """Trains for so many micro-batches."""
    data = batches(engine.train_micro_batch_size_per_gpu(), engine.device)
    for _ in range(steps):
        inputs, labels = next(data)
        engine.backward(F.cross_entropy(engine(inputs), labels))
        engine.step()
