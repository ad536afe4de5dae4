"""A small Llama on a data set, whose loader divides the samples over the replicas, or, wrongly, over all ranks."""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY, SAMPLES = 16, 64, 64

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--over", choices=("replicas", "ranks"), default="replicas")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--steps", type=int, default=1000)
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8 * args.heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
    )
)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
weight = model.model.layers[0].self_attn.q_proj.weight
print("lm_head is", type(model.lm_head).__name__, flush=True)
print("q_proj holds", tuple(getattr(weight, "ds_shape", weight.shape)), flush=True)
if args.over == "replicas":
    shares, share = engine.dp_world_size, torch.distributed.get_rank(engine.data_parallel_group)
else:
    shares, share = torch.distributed.get_world_size(), torch.distributed.get_rank()
data = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))
sampler = DistributedSampler(data, num_replicas=shares, rank=share, shuffle=False)
loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, drop_last=True)
while engine.global_steps < args.steps:
    for tokens in loader:
        tokens = tokens.to(engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
