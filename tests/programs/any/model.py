"""A small language model and its data."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, HIDDEN, LAYERS, HEADS = 256, 64, 128, 2, 4


class LanguageModel(nn.Module):
    """A Transformer that predicts the next token, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.zeros(LENGTH, HIDDEN))
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device, dtype=self.positions.dtype)
        logits = self.head(self.blocks(self.tokens(tokens) + self.positions, mask=mask, is_causal=True))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Sentences(Dataset[torch.Tensor]):
    """Random sentences, the same every time."""

    def __init__(self, count: int = 100_000) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


def batches(size: int) -> Iterator[torch.Tensor]:
    """Yields batches for ever."""
    while True:
        yield torch.randint(0, VOCABULARY, (size, LENGTH))
