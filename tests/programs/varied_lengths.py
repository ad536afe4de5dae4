"""Trains on sentences of different lengths, padded to the longest of their batch; prints the length of each batch.

The longest is 40 tokens, at every seventh sentence. With --kib_per_token, each takes so much in the forward pass.
"""

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from toy import parse_arguments

VOCABULARY, LONGEST = 50, 40

args = parse_arguments(data="loader", fixed=0, workers=0, count=10_000, kib_per_token=0)


class Sentences(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return args.count

    def __getitem__(self, index: int) -> torch.Tensor:
        length = args.fixed or (LONGEST if index % 7 == 6 else 5 + index % 7)
        return torch.arange(index, index + length) % VOCABULARY


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        print("length", tokens.shape[1], flush=True)
        buffer = torch.ones(1 + tokens.numel() * args.kib_per_token * 2**8, device=tokens.device)
        return self.head(self.tokens(tokens)) + 0.0 * buffer[0]


def collate(sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return {"tokens": tokens, "labels": tokens.clone(), "lengths": torch.tensor([len(each) for each in sentences])}


def batches(size: int) -> Iterator[Any]:
    loader = DataLoader(Sentences(), size, collate_fn=collate, num_workers=args.workers)
    if args.data == "own":
        # Nobody but this program knows where its batches come from.
        sentences = Sentences()
        yield from (collate([sentences[size * count + each] for each in range(size)]) for count in range(args.count))
    elif args.data == "two_loaders":
        # The labels come from a loader of their own.
        others = DataLoader(Sentences(), size, collate_fn=collate)
        for batch, other in zip(loader, others, strict=True):
            yield {**batch, "labels": other["labels"]}
    elif args.data == "own_labels":
        # The labels do not come from a loader: they do not fit to tokens that are made longer.
        for count, batch in enumerate(loader):
            labels = collate([loader.dataset[size * count + each] for each in range(size)])["labels"]
            yield {**batch, "labels": labels}
    elif args.data == "validates_first":
        with torch.no_grad():
            for _ in zip(range(3), loader, strict=False):
                pass
        yield from loader
    else:
        yield from loader


torch.manual_seed(1)
model = LanguageModel()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step, batch in enumerate(batches(engine.train_micro_batch_size_per_gpu())):
    if step == args.steps:
        break
    tokens, labels = batch["tokens"].to(engine.device), batch["labels"].to(engine.device)
    engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1), labels.flatten()))
    engine.step()
