"""Trains a small recurrent network on random tokens: the third model of the recorded tables."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn


class RecurrentModel(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden // 2)
        self.recurrent = nn.GRU(hidden // 2, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        return self.head(states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq_length", type=int, default=24)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = RecurrentModel(arguments.vocabulary, arguments.hidden)
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    shape = (engine.train_micro_batch_size_per_gpu(), arguments.seq_length + 1)
    draws = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(arguments.steps * engine.gradient_accumulation_steps()):
        tokens = torch.randint(0, arguments.vocabulary, shape, generator=draws)
        engine.backward(F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
        engine.step()


if __name__ == "__main__":
    main()
