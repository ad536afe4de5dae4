"""A Llama of 8 billion parameters, as its users train it: transformers, DeepSpeed, 2,048 tokens."""

import argparse

import deepspeed
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, TOKENS = 128_256, 2048


class Tokens(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))


parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--layers", type=int, default=32)
args = parser.parse_args()

config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=args.layers,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    use_cache=False,
)
model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=Tokens()
)
for batch in loader:
    tokens = batch.to(engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
