"""A pipeline of linear layers. An option gives its number of stages, and the other ranks are replicas."""

import argparse
from itertools import pairwise

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import nn

FEATURES, WIDTH, CLASSES, SAMPLES = 8, 32, 4, 64

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--pipeline_stages", type=int, default=1)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--steps", type=int, default=1000)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(1)
widths = [FEATURES, *[WIDTH] * (args.layers - 1), CLASSES]
model = PipelineModule(
    [nn.Linear(one, other) for one, other in pairwise(widths)],
    num_stages=args.pipeline_stages,
    loss_fn=F.cross_entropy,
    partition_method="uniform",
)
drawn = torch.Generator().manual_seed(3)
data = torch.utils.data.TensorDataset(
    torch.randn(SAMPLES, FEATURES, generator=drawn), torch.randint(0, CLASSES, (SAMPLES,), generator=drawn)
)
engine, *_ = deepspeed.initialize(
    args=args, model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], training_data=data
)
print("replicas", engine.dp_world_size, "stages", engine.num_stages, flush=True)
for _ in range(args.steps):
    engine.train_batch()
