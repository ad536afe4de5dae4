"""Fills each batch with as many sentences of like lengths as a budget of tokens allows.

The micro-batch in the DeepSpeed configuration is there because DeepSpeed demands one; no batch is made by it.
"""

import argparse
import random

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader

WORDS, LENGTHS = 200, (4, 6, 10, 16, 24, 48)

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--tokens", type=int, default=256)
parser.add_argument("--updates", type=int, default=200)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

chance = random.Random(11)
sentences = [[chance.randrange(1, WORDS) for _ in range(chance.choice(LENGTHS))] for _ in range(4000)]


def batches_of(budget: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(sentences)), key=lambda each: len(sentences[each])):
        if len(sentences[index]) * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(index)
    random.Random(1).shuffle(batches)
    return batches[rank : len(batches) - len(batches) % ranks : ranks]


def padded(batch: list[list[int]]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(each) for each in batch], batch_first=True)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 48, padding_idx=0)
        self.mix = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True)
        self.head = nn.Linear(48, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.words(words), src_key_padding_mask=words == 0)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten(), ignore_index=0)


torch.manual_seed(3)
model = Tagger()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
print("engine", micro, accumulation, engine.train_batch_size(), flush=True)
loader = DataLoader(sentences, batch_sampler=batches_of(args.tokens), collate_fn=padded)
while engine.global_steps < args.updates:
    for words in loader:
        engine.backward(engine(words.to(engine.device)))
        engine.step()
        if engine.global_steps == args.updates:
            break
