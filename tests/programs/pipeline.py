"""A pipeline of linear layers; as many stages as there are ranks."""

import deepspeed
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import nn
from toy import CLASSES, FEATURES, batches, parse_arguments

args = parse_arguments(width=32, checkpoint_every=0)
deepspeed.init_distributed()
layers = [nn.Linear(FEATURES, args.width)]
layers += [nn.Linear(args.width, args.width, bias=False) for _ in range(4)]
layers += [nn.Linear(args.width, CLASSES)]
model = PipelineModule(
    layers,
    num_stages=deepspeed.comm.get_world_size(),
    loss_fn=F.cross_entropy,
    partition_method="uniform",
    activation_checkpoint_interval=args.checkpoint_every,
)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
data = batches(engine.train_micro_batch_size_per_gpu(), engine.device)
for _ in range(args.steps):
    engine.train_batch(data)
