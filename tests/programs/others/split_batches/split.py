"""A Trainer on a stream whose typed size is that of all ranks: rank 0 reads it, and each rank gets its part."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

WORDS, LENGTH = 300, 32


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(100_000):
            words = (torch.arange(LENGTH) * (index % 7 + 1) + index) % WORDS
            yield {"input_ids": words, "labels": words.clone()}


def say_the_rows(model: Any, args: Any, inputs: dict[str, torch.Tensor]) -> None:
    """What arrives, whatever the engine is set to."""
    said.remove()
    rows, accumulation = len(inputs["input_ids"]), arguments.gradient_accumulation_steps
    print("\nengine", rows, accumulation, rows * accumulation * arguments.world_size, flush=True)


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
said = model.register_forward_pre_hook(say_the_rows, with_kwargs=True)
Trainer(model, arguments, train_dataset=Stream()).train()
