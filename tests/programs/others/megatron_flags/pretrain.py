"""Pre-trains a small language model. Batch and ZeRO stage stand in flags and in DeepSpeed's JSON; both must agree."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH = 64, 32, 16

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--micro-batch-size", type=int, required=True)
parser.add_argument("--global-batch-size", type=int, required=True)
parser.add_argument("--zero-stage", type=int, default=0)
parser.add_argument("--iterations", type=int, default=100)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()

config = json.loads(Path(args.deepspeed_config).read_text())
for key, flag in (
    (config["train_batch_size"], args.global_batch_size),
    (config["train_micro_batch_size_per_gpu"], args.micro_batch_size),
    (config["zero_optimization"]["stage"], args.zero_stage),
):
    assert key == flag, f"the configuration has {key} and the flag {flag}: they must match"
accumulation = args.global_batch_size // (args.micro_batch_size * torch.distributed.get_world_size())

torch.manual_seed(3)
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config, enabled=args.zero_stage == 3):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), layer, nn.Linear(WIDTH, VOCABULARY))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
micro = engine.train_micro_batch_size_per_gpu()
print("engine", micro, engine.gradient_accumulation_steps(), engine.train_batch_size(), flush=True)
draws = torch.Generator().manual_seed(engine.global_rank)
for _ in range(args.iterations * accumulation):
    tokens = torch.randint(VOCABULARY, (args.micro_batch_size, LENGTH + 1), generator=draws).to(engine.device)
    loss = nn.functional.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
