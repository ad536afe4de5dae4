"""Trains a small residual network on random images: the second model of the recorded tables."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


class ConvNet(nn.Module):
    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 1000))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = ConvNet(arguments.channels, arguments.blocks)
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    size = engine.train_micro_batch_size_per_gpu()
    draws = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(arguments.steps * engine.gradient_accumulation_steps()):
        images = torch.randn(size, 3, 32, 32, generator=draws)
        labels = torch.randint(0, 1000, (size,), generator=draws)
        engine.backward(F.cross_entropy(engine(images), labels))
        engine.step()


if __name__ == "__main__":
    main()
