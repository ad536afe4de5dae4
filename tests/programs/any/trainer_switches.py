"""A Trainer whose first step prints what its switches have made of the model."""

from dataclasses import dataclass

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from model import LENGTH, VOCABULARY, Sentences


@dataclass
class ModelArguments:
    """The attention of the model."""

    attention: str = "sdpa"


class Shown(TrainerCallback):
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step == 0:
            print(f"checkpointing {model.is_gradient_checkpointing} attention {model.config._attn_implementation}")


def collate(sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(sentences)
    return {"input_ids": tokens, "labels": tokens}


model_arguments, arguments = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
torch.manual_seed(1)
config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0)
config._attn_implementation = model_arguments.attention
model = GPT2LMHeadModel(config)
Trainer(model=model, args=arguments, train_dataset=Sentences(), data_collator=collate, callbacks=[Shown()]).train()
