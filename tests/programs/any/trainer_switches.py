"""A Trainer that prints what its switches have made of the model and its loader, and the graphs of each step."""

import sys
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

    attn_implementation: str = "sdpa"


def graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


class Shown(TrainerCallback):
    def __init__(self) -> None:
        # A process that runs this again has counted before.
        self._before = graphs()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step == 0:
            print(f"checkpointing {model.is_gradient_checkpointing} attention {model.config._attn_implementation}")
            loader = kwargs["train_dataloader"]
            # Accelerate reads the loader that it has wrapped.
            read = getattr(loader, "base_dataloader", loader)
            names = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
            print("loader", *(getattr(read, name) for name in names))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        now = graphs()
        recomputed = sum(bool(getattr(each, "gradient_checkpointing", False)) for each in model.transformer.h)
        print(f"step {state.global_step} graphs {max(0, now - self._before)} recomputed {recomputed}", flush=True)
        self._before = now

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if logs and "loss" in logs:
            print(f"loss {logs['loss']}", flush=True)


def collate(sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(sentences)
    return {"input_ids": tokens, "labels": tokens}


model_arguments, arguments = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
torch.manual_seed(1)
dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
config = GPT2Config(
    vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=1, n_head=4, bos_token_id=0, **dropout
)
config._attn_implementation = model_arguments.attn_implementation
model = GPT2LMHeadModel(config)
Trainer(model=model, args=arguments, train_dataset=Sentences(), data_collator=collate, callbacks=[Shown()]).train()
