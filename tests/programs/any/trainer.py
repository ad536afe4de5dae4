"""Trains a small GPT-2 by the Hugging Face Trainer: `deepspeed trainer.py --deepspeed ds_auto.json --max_steps 30`."""

from dataclasses import dataclass

import torch
from stopwatch import Stopwatch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from model import LENGTH, VOCABULARY, Sentences


@dataclass
class ModelArguments:
    """The model's size, and how much of it is left out at random."""

    hidden_size: int = 128
    layers: int = 2
    dropout: float = 0.1


class StopwatchCallback(TrainerCallback):
    """Takes the time of each optimizer step."""

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._stopwatch.step(args.per_device_train_batch_size * args.gradient_accumulation_steps)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._stopwatch.report()


def collate(sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(sentences)
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_arguments, training_arguments = parser.parse_args_into_dataclasses()
    set_seed(training_arguments.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=model_arguments.hidden_size,
            n_layer=model_arguments.layers,
            n_head=4,
            resid_pdrop=model_arguments.dropout,
            embd_pdrop=model_arguments.dropout,
            attn_pdrop=model_arguments.dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    trainer = Trainer(
        model=model,
        args=training_arguments,
        train_dataset=Sentences(),
        data_collator=collate,
        callbacks=[StopwatchCallback()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
