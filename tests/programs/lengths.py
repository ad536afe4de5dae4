"""Trains on sentences whose lengths are lognormal, in one of several orders; with --show, prints which ones.

A step takes as long as the longest sentence of each of its batches makes it, so the data decide on what a step costs.
"""

import random
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from toy import parse_arguments

MEDIAN, SHORTEST, LONGEST, BUCKET = 40, 4, 400, 256

args = parse_arguments(sigma=1.0, order="shuffled", samples=8192, workers=0, show=0, hidden=32)


def lengths() -> list[int]:
    draws = random.Random(1)
    drawn = [round(MEDIAN * 2.718281828 ** draws.gauss(0, args.sigma)) for _ in range(args.samples)]
    kept = [min(LONGEST, max(SHORTEST, each)) for each in drawn]
    if args.order == "packed":
        # Rows of one length, with as many sentences as go into it.
        return [LONGEST] * (sum(kept) // LONGEST)
    return sorted(kept) if args.order == "sorted" else kept


class Sentences(Dataset[Any]):
    def __init__(self) -> None:
        self.lengths = lengths()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.arange(index, index + self.lengths[index]) % 50


class Stream(IterableDataset[Any]):
    """A rank's part of the sentences, without their number."""

    def __iter__(self) -> Iterator[Any]:
        sentences, world = Sentences(), torch.distributed.get_world_size()
        return (sentences[index] for index in range(torch.distributed.get_rank(), len(sentences), world))


class Buckets:
    """A rank's batches of sentences that are about as long, in another order than by length."""

    def __init__(self, sentences: Sentences, size: int) -> None:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own = range(rank, len(sentences), world)
        self.batches = []
        for start in range(0, len(own), BUCKET):
            alike = sorted(own[start : start + BUCKET], key=sentences.lengths.__getitem__)
            cut = [alike[first : first + size] for first in range(0, len(alike), size)]
            random.Random(start).shuffle(cut)
            self.batches += cut

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, args.hidden)
        self.layer = nn.TransformerEncoderLayer(args.hidden, 2, 4 * args.hidden, dropout=0.0, batch_first=True)
        self.head = nn.Linear(args.hidden, 50)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.tokens(input_ids), src_key_padding_mask=attention_mask == 0))


def collate(drawn: list[tuple[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = [each for _, each in drawn]
    return {
        "index": torch.tensor([index for index, _ in drawn]),
        "input_ids": nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True),
    }


def loader(size: int) -> DataLoader[Any]:
    options: dict[str, Any] = {"collate_fn": collate, "num_workers": args.workers}
    if args.order == "stream":
        return DataLoader(Stream(), size, **options)
    sentences = Sentences()
    if args.order == "bucketed":
        return DataLoader(sentences, batch_sampler=Buckets(sentences, size), **options)
    sampler = DistributedSampler(sentences, shuffle=False)
    return DataLoader(sentences, size, sampler=sampler, drop_last=True, **options)


torch.manual_seed(1)
deepspeed.init_distributed()
model = Encoder()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
batches = loader(engine.train_micro_batch_size_per_gpu())
for _ in range(args.steps):
    for batch in batches:
        if args.show:
            print("samples", *batch["index"].tolist(), flush=True)
        tokens, mask = batch["input_ids"].to(engine.device), batch["attention_mask"].to(engine.device)
        # A sum over all tokens, so that the losses of a step do not depend on how it is cut.
        labels = tokens.masked_fill(mask == 0, -100).flatten()
        logits = engine(input_ids=tokens, attention_mask=mask).flatten(0, 1)
        engine.backward(F.cross_entropy(logits, labels, reduction="sum") / len(tokens) / MEDIAN)
        engine.step()
