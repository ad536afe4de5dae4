"""A small Llama, which DeepSpeed's AutoTP splits over the ranks where the configuration says so."""

import deepspeed
import torch
from toy import parse_arguments
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY = 16, 64

args = parse_arguments()
torch.manual_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
# The ranks of one replica train on the same samples.
samples = torch.Generator().manual_seed(3)
while True:
    tokens = torch.randint(0, VOCABULARY, (engine.train_micro_batch_size_per_gpu(), LENGTH), generator=samples)
    tokens = tokens.to(engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
