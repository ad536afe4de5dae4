"""A Trainer whose DeepSpeed configuration may be the name of a preset."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

WORDS, LENGTH = 300, 32


class Arguments(TrainingArguments):
    def __post_init__(self) -> None:
        preset = Path(__file__).with_name("presets") / f"{self.deepspeed}.json"
        self.deepspeed = str(preset) if preset.exists() else self.deepspeed
        super().__post_init__()


class SaysItsBatch(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            engine = trainer.deepspeed
            batch = (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
            print("\nengine", *batch, engine.train_batch_size(), flush=True)


(arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
)
rows = [{"input_ids": words, "labels": words} for words in torch.randint(WORDS, (3000, LENGTH))]
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, callbacks=[SaysItsBatch()])
trainer.train()
