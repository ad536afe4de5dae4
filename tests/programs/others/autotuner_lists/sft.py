"""Fine-tunes by Hugging Face's Trainer. Its DeepSpeed configuration is one that DeepSpeed's autotuner has read."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH = 64, 16


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = (torch.arange(LENGTH) * (number % 7 + 1) + number) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Shown(TrainerCallback):
    """Shows the batch of the engine."""

    def on_step_begin(self, args, state, control, **given) -> None:
        if state.global_step == 0:
            engine = trainer.model_wrapped
            micro = engine.train_micro_batch_size_per_gpu()
            # The bar of the progress has no end of line.
            print("\nengine", micro, engine.gradient_accumulation_steps(), engine.train_batch_size(), flush=True)


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks=[Shown()])
trainer.train()
