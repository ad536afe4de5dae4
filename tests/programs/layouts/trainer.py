"""A small Llama in a Hugging Face Trainer. Accelerate's variables may have its ranks share the tokens of a sample."""

import deepspeed
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH = 64, 16


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        row = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row.clone(), "position_ids": torch.arange(LENGTH)}


# Ulysses asks DeepSpeed for its ranks, and the Trainer makes those of a CPU without DeepSpeed.
deepspeed.init_distributed()
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="sdpa",
    )
)
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
