"""Trains one of eleven small models of different kinds on random data."""

import argparse
import itertools

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES = 300


class Translator(nn.Module):
    """An encoder and a decoder with dropout."""

    LENGTH, WIDTH = 24, 160

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(CLASSES, self.WIDTH), nn.Embedding(CLASSES, self.WIDTH)
        self.body = nn.Transformer(self.WIDTH, 4, 2, 2, 3 * self.WIDTH, batch_first=True)
        self.head = nn.Linear(self.WIDTH, CLASSES)

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        source, target = torch.randint(0, CLASSES, (2, size, self.LENGTH), generator=draws)
        mask = nn.Transformer.generate_square_subsequent_mask(self.LENGTH)
        said = self.head(self.body(self.source(source), self.target(target), tgt_mask=mask))
        return F.cross_entropy(said.flatten(0, 1), target.flatten())


class Segmenter(nn.Module):
    """Convolutions down and up, with connections across."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 96)
        pairs = list(itertools.pairwise(widths))
        self.downs = nn.ModuleList(self._block(one, other) for one, other in pairs)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(other, one, 2, 2) for one, other in pairs[:0:-1])
        self.joins = nn.ModuleList(self._block(2 * one, one) for one, _ in pairs[:0:-1])
        self.head = nn.Conv2d(widths[1], 8, 1)

    @staticmethod
    def _block(one: int, other: int) -> nn.Sequential:
        convolutions = nn.Conv2d(one, other, 3, padding=1), nn.Conv2d(other, other, 3, padding=1)
        return nn.Sequential(convolutions[0], nn.GroupNorm(4, other), nn.ReLU(), convolutions[1], nn.SiLU())

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        x = torch.randn(size, 3, 32, 32, generator=draws)
        kept = []
        for down in self.downs:
            x = down(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for up, join, across in zip(self.ups, self.joins, kept[-2::-1], strict=True):
            x = join(torch.cat([up(x), across], 1))
        return F.cross_entropy(self.head(x), torch.randint(0, 8, (size, 32, 32), generator=draws))


class Recommender(nn.Module):
    """Large tables of embeddings, and little beside them."""

    ROWS, WIDTH, FIELDS = 20_000, 96, 8

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Embedding(self.ROWS, self.WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(self.FIELDS * self.WIDTH, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        rows = torch.randint(0, self.ROWS, (size, self.FIELDS), generator=draws)
        clicked = torch.randint(0, 2, (size,), generator=draws).float()
        return F.binary_cross_entropy_with_logits(self.layers(self.tables(rows).flatten(1)).squeeze(1), clicked)


class Mixer(nn.Module):
    """Layers across places, and across channels."""

    PLACES, WIDTH, DEPTH = 64, 128, 6

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.ModuleList(self._wide(self.PLACES, 2) for _ in range(self.DEPTH))
        self.within = nn.ModuleList(self._wide(self.WIDTH, 4) for _ in range(self.DEPTH))
        self.head = nn.Linear(self.WIDTH, CLASSES)

    @staticmethod
    def _wide(width: int, factor: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width))

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        x = torch.randn(size, self.PLACES, self.WIDTH, generator=draws)
        for across, within in zip(self.across, self.within, strict=True):
            x = x + across(F.layer_norm(x, (self.WIDTH,)).transpose(1, 2)).transpose(1, 2)
            x = x + within(F.layer_norm(x, (self.WIDTH,)))
        return F.cross_entropy(self.head(x.mean(1)), torch.randint(0, CLASSES, (size,), generator=draws))


class Ranker(nn.Module):
    """A loss of all pairs, whose memory grows with the square of the batch."""

    WIDTH = 256

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(self.WIDTH, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 1)
        )

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        scores = self.layers(torch.randn(size, self.WIDTH, generator=draws)).squeeze(1)
        relevance = torch.randn(size, generator=draws)
        above = (relevance[:, None] > relevance[None]).float()
        return (F.softplus(scores[None] - scores[:, None]) * above).mean()


class Listener(nn.Module):
    """A convolution over time, recurrent layers both ways, and a loss of alignments."""

    LENGTH, BANDS, WIDTH, LABELS = 100, 40, 128, 60

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(self.BANDS, 160, 5, stride=2, padding=2)
        self.body = nn.LSTM(160, self.WIDTH, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * self.WIDTH, self.LABELS)

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        sound = torch.randn(size, self.BANDS, self.LENGTH, generator=draws)
        heard, _ = self.body(F.relu(self.front(sound)).transpose(1, 2))
        labels = torch.randint(1, self.LABELS, (size, 12), generator=draws)
        steps = torch.full((size,), heard.shape[1])
        return F.ctc_loss(
            self.head(heard).log_softmax(-1).transpose(0, 1), labels, steps, torch.full((size,), labels.shape[1])
        )


class Denoiser(nn.Module):
    """Convolutions, and attention over the places of an image as it is written in papers."""

    WIDTH, SIDE, DEPTH = 64, 16, 2

    def __init__(self) -> None:
        super().__init__()
        width = self.WIDTH
        self.begin, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2 * self.DEPTH))
        self.attends = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(self.DEPTH))

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        noise = torch.randn(size, 3, self.SIDE, self.SIDE, generator=draws)
        x = self.begin(noise) + self.time(torch.randn(size, self.WIDTH, generator=draws))[:, :, None, None]
        for layer in range(self.DEPTH):
            x = x + self.convolutions[2 * layer + 1](F.silu(self.convolutions[2 * layer](F.silu(x))))
            q, k, v = self.attends[layer](x.flatten(2).transpose(1, 2)).chunk(3, -1)
            weights = (q @ k.transpose(1, 2) / self.WIDTH**0.5).softmax(-1)
            x = x + (weights @ v).transpose(1, 2).unflatten(2, (self.SIDE, self.SIDE))
        return F.mse_loss(self.end(x), noise)


class Adapted(nn.Module):
    """A frozen network with small trained matrices beside its own, recomputed block by block."""

    LENGTH, WIDTH, DEPTH, RANK = 48, 256, 4, 8

    def __init__(self) -> None:
        super().__init__()
        width = self.WIDTH
        self.tokens = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]) for _ in range(self.DEPTH)
        )
        self.head = nn.Linear(width, CLASSES)
        self.requires_grad_(False)
        self.downs = nn.ModuleList(nn.Linear(width, self.RANK, bias=False) for _ in range(self.DEPTH))
        self.ups = nn.ModuleList(nn.Linear(self.RANK, 4 * width, bias=False) for _ in range(self.DEPTH))

    def _block(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        normal = F.layer_norm(x, (self.WIDTH,))
        wide, narrow = self.blocks[layer]
        return x + narrow(F.gelu(wide(normal) + self.ups[layer](self.downs[layer](normal))))

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        tokens = torch.randint(0, CLASSES, (size, self.LENGTH), generator=draws)
        x = self.tokens(tokens).requires_grad_()
        for layer in range(self.DEPTH):
            x = checkpoint(self._block, x, layer, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Pairing(nn.Module):
    """Two towers whose batch has the negatives of each pair."""

    WIDTH = 384

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(self.WIDTH, 768), nn.GELU(), nn.Linear(768, 192)) for _ in range(2)
        )

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        pairs = torch.randn(2, size, self.WIDTH, generator=draws)
        one, other = (F.normalize(tower(rows), dim=-1) for tower, rows in zip(self.towers, pairs, strict=True))
        likeness, own = 20 * one @ other.T, torch.arange(size)
        return (F.cross_entropy(likeness, own) + F.cross_entropy(likeness.T, own)) / 2


class Speaker(nn.Module):
    """Sounds of unequal lengths, padded to the longest of a micro-batch, and a loss of alignments."""

    BANDS, WIDTH, LABELS = 40, 160, 40

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(self.BANDS, self.WIDTH, 3, stride=2, padding=1), nn.GELU())
        self.body = nn.ModuleList(nn.GRU(self.WIDTH, self.WIDTH, batch_first=True) for _ in range(3))
        self.head = nn.Linear(self.WIDTH, self.LABELS)

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        lengths = (60 * torch.randn(size, generator=draws).mul(0.4).exp()).clamp(24, 240).long()
        x = self.front(torch.randn(size, self.BANDS, int(lengths.max()), generator=draws)).transpose(1, 2)
        for layer in self.body:
            x = x + layer(x)[0]
        labels = torch.randint(1, self.LABELS, (size, 8), generator=draws)
        said = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(said, labels, lengths // 2, torch.full((size,), labels.shape[1]), zero_infinity=True)


class Painter(nn.Module):
    """Convolutions down and up whose blocks are recomputed."""

    WIDTHS = (3, 32, 64, 96)

    def __init__(self) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(self.WIDTHS))
        self.downs = nn.ModuleList(Segmenter._block(one, other) for one, other in pairs)
        self.ups = nn.ModuleList(Segmenter._block(one + other, one) for one, other in pairs[:0:-1])
        self.head = nn.Conv2d(self.WIDTHS[1], 3, 1)

    def forward(self, size: int, draws: torch.Generator) -> torch.Tensor:
        noise = torch.randn(size, 3, 32, 32, generator=draws)
        x, kept = noise.clone().requires_grad_(), []
        for down in self.downs:
            x = checkpoint(down, F.avg_pool2d(x, 2) if kept else x, use_reentrant=False)
            kept.append(x)
        for up, across in zip(self.ups, kept[-2::-1], strict=True):
            x = checkpoint(up, torch.cat([F.interpolate(x, scale_factor=2), across], 1), use_reentrant=False)
        return F.mse_loss(self.head(x), noise)


MODELS = {
    each.__name__.lower(): each
    for each in (
        *(Translator, Segmenter, Recommender, Mixer, Ranker, Listener, Denoiser, Adapted, Pairing),
        *(Speaker, Painter),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = MODELS[arguments.model]()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=trained)
    size = engine.train_micro_batch_size_per_gpu()
    draws = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(arguments.steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(size, draws))
        engine.step()


if __name__ == "__main__":
    main()
