"""Trains a small residual network on images that come from a store over the network, one after another."""

import argparse
import time
import zlib

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIDE = 32


class Store(Dataset):
    """Images that are packed, each at the other end of a network.

    Args:
        seconds: that the store takes to answer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        draws = torch.Generator().manual_seed(1)
        images = torch.randint(0, 256, (64, 3, SIDE, SIDE), generator=draws, dtype=torch.uint8)
        self.packed = [zlib.compress(image.numpy().tobytes()) for image in images]

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        pixels = bytearray(zlib.decompress(self.packed[index % len(self.packed)]))
        image = torch.frombuffer(pixels, dtype=torch.uint8).reshape(3, SIDE, SIDE)
        return image.float() / 255 - 0.5, index % 10


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
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--answer-ms", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = ConvNet(arguments.channels, arguments.blocks)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(args=arguments, model=model, optimizer=adam)
    data = Store(arguments.answer_ms / 1000)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=DistributedSampler(data))
    for _ in range(arguments.epochs):
        for images, labels in loader:
            engine.backward(F.cross_entropy(engine(images.to(engine.device)), labels.to(engine.device)))
            engine.step()


if __name__ == "__main__":
    main()
