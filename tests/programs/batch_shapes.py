"""Trains on batches whose rows are not simply samples, or on a model that cannot take any number of them.

--kind: `pairs` has two rows for each sample, `packed` one row for all of them, `sequence_first` a sample in each
column, `budget` as many sentences as have 96 tokens together, of other lengths on the next rank; `two_at_least` has a
layer that needs two samples, `four_at_least` a loss that needs four. --length: of a sequence, where the kind does not
say it. --accumulate: micro-batches of an optimizer step, whatever the engine is set to.
"""

import itertools
from collections.abc import Iterator

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from toy import parse_arguments

VOCABULARY, BUDGET = 50, 96

args = parse_arguments(kind="pairs", length=9, accumulate=0)
SEQUENCE = 0 if args.kind == "sequence_first" else 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.BatchNorm1d(16) if args.kind == "two_at_least" else nn.Identity()
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if args.kind == "four_at_least":
            assert len(tokens) >= 4, "a sample needs three others to be told from"
        return self.head(self.norm(self.tokens(tokens).mean(SEQUENCE)))


def batches(size: int) -> Iterator[torch.Tensor]:
    for step in itertools.count():
        if args.kind == "packed":
            yield torch.randint(VOCABULARY, (1, sum(8 + (step + each) % 3 for each in range(size))))
        elif args.kind == "budget":
            length = (8, 12, 24, 48)[(step + torch.distributed.get_rank()) % 4]
            yield torch.randint(VOCABULARY, (BUDGET // length, length))
        elif args.kind == "sequence_first":
            yield torch.randint(VOCABULARY, (args.length, size))
        else:
            yield torch.randint(VOCABULARY, (size * (2 if args.kind == "pairs" else 1), args.length))


torch.manual_seed(1)
model = Model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
data = itertools.islice(batches(engine.train_micro_batch_size_per_gpu()), args.steps)
for number, tokens in enumerate(data, start=1):
    tokens = tokens.to(engine.device)
    if args.accumulate:
        engine.set_gradient_accumulation_boundary(number % args.accumulate == 0)
    engine.backward(F.cross_entropy(engine(tokens), tokens.select(SEQUENCE, 0)))
    engine.step()
