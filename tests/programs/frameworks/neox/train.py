"""What `deepy.py` starts: the loader has its batch from the program's settings, and the engine from DeepSpeed's."""

import argparse
import base64
import json

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--deepspeed_config")
parser.add_argument("--megatron_config")
arguments = parser.parse_args()
settings = json.loads(base64.urlsafe_b64decode(arguments.megatron_config))
config = json.loads(base64.urlsafe_b64decode(arguments.deepspeed_config))
torch.manual_seed(3)
width, length = settings["hidden_size"], settings["seq_length"]
layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
model = nn.Sequential(
    nn.Embedding(500, width), nn.TransformerEncoder(layer, settings["num_layers"]), nn.Linear(width, 500)
)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
draws = torch.Generator().manual_seed(engine.global_rank)
for _ in range(settings["train_iters"] * engine.gradient_accumulation_steps()):
    shape = (settings["train_micro_batch_size_per_gpu"], length + 1)
    tokens = torch.randint(500, shape, generator=draws).to(engine.device)
    loss = nn.functional.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
