"""Trainings whose rows depend on each other within a micro-batch, and others whose rows do not.

`--kind` is a layer, a loss, or both, and `--inside` has the model return the loss.
"""

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
import toy
from torch import nn

CLASSES, CHANNELS, PIXELS, TOKENS, VOCABULARY = 5, 8, 12, 10, 40


class Whitened(nn.Module):
    """Batch statistics of the user's own."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (features - features.mean(0)) / (features.std(0) + 1e-3)


class AcrossAttention(nn.Module):
    """Attends over the samples of a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(features, features, features)
        return features + attended


def info_nce(outputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    one, other = (F.normalize(part.float(), dim=1) for part in outputs.chunk(2, 1))
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one), device=one.device))


def triplets(outputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    return F.triplet_margin_loss(outputs, 0.9 * outputs.detach(), outputs.roll(1, 0), margin=5.0)


def regression(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs[:, 0].float(), labels.float())


LAYERS: dict[str, Any] = {
    "batch_norm": lambda: nn.BatchNorm2d(CHANNELS),
    "untracked_batch_norm": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "group_norm": lambda: nn.GroupNorm(2, CHANNELS),
    "instance_norm": lambda: nn.InstanceNorm2d(CHANNELS),
    "frozen_batch_norm": lambda: _Frozen(CHANNELS),
    "dropout": lambda: nn.Dropout2d(0.3),
}
LAST: dict[str, Any] = {
    "whitened": Whitened,
    "attention_over_samples": lambda: AcrossAttention(32),
    "layer_norm": lambda: nn.LayerNorm(32),
}
LOSSES = {"info_nce": info_nce, "triplets": triplets, "regression": regression}


class _Frozen(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.eval()

    def train(self, mode: bool = True) -> "_Frozen":
        return super().train(False)


class Pictures(nn.Module):
    """A model of images, with its loss or without."""

    def __init__(self, kind: str, inside: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3)
        self.layer = LAYERS.get(kind, nn.Identity)()
        self.pooled = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * CHANNELS, 32))
        self.layers = nn.Sequential(LAST.get(kind, nn.Identity)(), nn.Dropout(0.1), nn.ReLU())
        self.head = nn.Linear(32, CLASSES + 1)
        self.loss = LOSSES.get(kind, F.cross_entropy)
        self.inside = inside

    def forward(self, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs = self.head(self.layers(self.pooled(self.layer(self.first(pictures)))))
        return self.loss(outputs, labels) if self.inside else outputs


class Texts(nn.Module):
    """A language model whose loss is a mean over the tokens that are no padding."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 32), nn.LayerNorm(32)
        self.head, self.drop = nn.Linear(32, VOCABULARY), nn.Dropout(0.1)
        self.loss, self.inside = mean_over_tokens, inside

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs = self.head(self.drop(self.norm(self.embedding(tokens))))
        return self.loss(outputs, labels) if self.inside else outputs


def mean_over_tokens(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batches(kind: str, size: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ...]]:
    while True:
        if kind in ("padded", "experts"):
            tokens = torch.randint(1, VOCABULARY, (size, TOKENS))
            lengths = torch.randint(3, TOKENS + 1, (size, 1)) if kind == "padded" else torch.full((size, 1), TOKENS)
            is_padding = torch.arange(TOKENS) >= lengths
            yield tokens.masked_fill(is_padding, 0).to(device), tokens.masked_fill(is_padding, -100).to(device)
        else:
            pictures = torch.randn(size, 3, PIXELS, PIXELS)
            yield pictures.to(device, dtype), torch.randint(0, CLASSES, (size,)).to(device)


def mixture() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
    )
    return MixtralForCausalLM(config)


def main() -> None:
    arguments = toy.parse_arguments(kind="batch_norm", inside=0)
    torch.manual_seed(1)
    kind, inside = arguments.kind, bool(arguments.inside)
    model = mixture() if kind == "experts" else Texts(inside) if kind == "padded" else Pictures(kind, inside)
    loss_of = getattr(model, "loss", None)
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    data = batches(kind, engine.train_micro_batch_size_per_gpu(), engine.device, next(model.parameters()).dtype)
    for _ in range(arguments.steps):
        inputs, labels = next(data)
        if kind == "experts":
            loss = engine(input_ids=inputs, labels=labels).loss
        else:
            outputs = engine(inputs, labels)
            loss = outputs if inside else loss_of(outputs, labels)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
