"""Trains by the Hugging Face Trainer and says what its engine has; IN_CODE has the arguments stand in the code."""

import os
from typing import Any

import torch
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(inputs).square().mean()}


class Teller(TrainerCallback):
    """Prints the engine's batch."""

    trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        engine = self.trainer.deepspeed
        own = (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), engine.train_batch_size())
        print("engine", *own, flush=True)


if "IN_CODE" in os.environ:
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        deepspeed="ds.json",
        max_steps=2,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
else:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
data = [{"inputs": torch.ones(4)} for _ in range(1000)]
trainer = Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Teller])
Teller.trainer = trainer
trainer.train()
