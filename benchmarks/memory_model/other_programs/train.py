"""Trains a decoder, a network of wide layers or a shrinking convolutional one on random data.

These programs are not those of the recorded tables. The CPU's constants of a foreseen prior come from them.
"""

import argparse
import itertools

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 400


class Decoder(nn.Module):
    LENGTH, WIDTH, HEADS, DEPTH = 48, 192, 6, 3

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, self.WIDTH), nn.Embedding(self.LENGTH, self.WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(self.WIDTH) for _ in range(2 * self.DEPTH))
        self.attends = nn.ModuleList(nn.Linear(self.WIDTH, 4 * self.WIDTH) for _ in range(self.DEPTH))
        self.ups = nn.ModuleList(nn.Linear(self.WIDTH, 4 * self.WIDTH) for _ in range(self.DEPTH))
        self.downs = nn.ModuleList(nn.Linear(4 * self.WIDTH, self.WIDTH) for _ in range(self.DEPTH))
        self.head = nn.Linear(self.WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(self.LENGTH))
        for layer in range(self.DEPTH):
            q, k, v, gate = self.attends[layer](self.norms[2 * layer](x)).chunk(4, dim=-1)
            q, k, v = (each.unflatten(-1, (self.HEADS, -1)).transpose(1, 2) for each in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + attended * gate.sigmoid()
            x = x + self.downs[layer](F.silu(self.ups[layer](self.norms[2 * layer + 1](x))))
        return self.head(x).flatten(0, 1)

    @classmethod
    def batch(cls, size: int, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, CLASSES, (size, cls.LENGTH + 1), generator=draws)
        return tokens[:, :-1], tokens[:, 1:].flatten()


class Wide(nn.Module):
    LENGTH, WIDTH, DEPTH = 32, 384, 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.DEPTH))
        self.head = nn.Linear(self.WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(F.layer_norm(x, (self.WIDTH,))))
        return self.head(x.mean(1))

    @classmethod
    def batch(cls, size: int, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randn(size, cls.LENGTH, cls.WIDTH, generator=draws)
        return rows, torch.randint(0, CLASSES, (size,), generator=draws)


class Shrinking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 96, 160, 224)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(one, other, 5, padding=2) for one, other in itertools.pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions:
            images = F.max_pool2d(F.leaky_relu(convolution(images)), 2, ceil_mode=True)
        return self.head(images.mean((2, 3)))

    @classmethod
    def batch(cls, size: int, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(size, 3, 40, 40, generator=draws)
        return images, torch.randint(0, CLASSES, (size,), generator=draws)


MODELS = {"decoder": Decoder, "wide": Wide, "shrinking": Shrinking}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="decoder")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = MODELS[arguments.model]()
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    size = engine.train_micro_batch_size_per_gpu()
    draws = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(arguments.steps * engine.gradient_accumulation_steps()):
        inputs, labels = model.batch(size, draws)
        engine.backward(F.cross_entropy(engine(inputs), labels))
        engine.step()


if __name__ == "__main__":
    main()
