"""A Trainer with a loss of its own, the mean of a micro-batch whatever the accumulation, and an option of its own."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

WORDS, LENGTH = 300, 32


@dataclass
class Own:
    smoothing: float = 0.1


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) * (index % 7 + 1) + index) % WORDS
        return {"input_ids": words, "labels": words.clone()}


class Smoothed(Trainer):
    smoothing = 0.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        scores = outputs.logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(scores, labels[:, 1:].flatten(), label_smoothing=self.smoothing)
        return (loss, outputs) if return_outputs else loss


class SaysItsBatch(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            engine = trainer.deepspeed
            batch = (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
            print("\nengine", *batch, engine.train_batch_size(), flush=True)


arguments, own = HfArgumentParser((TrainingArguments, Own)).parse_args_into_dataclasses()
config = GPT2Config(
    vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
)
trainer = Smoothed(GPT2LMHeadModel(config), arguments, train_dataset=Sequences(), callbacks=[SaysItsBatch()])
trainer.smoothing = own.smoothing
trainer.train()
