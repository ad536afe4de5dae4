"""Hugging Face's Trainer: a small GPT-2 learns the sources of Python's standard library, byte by byte."""

import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

LENGTH = 256


class Sources(torch.utils.data.Dataset):
    def __init__(self) -> None:
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(module.read_bytes() for module in modules[:60])
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.windows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Sources()).train()
