"""torch's profiler cannot be started on the last rank, as where its library for a GPU is missing."""

import deepspeed
import torch
from torch.profiler import profile
from toy import parse_arguments, small_model, train


def cannot_start(_profile: profile) -> None:
    raise RuntimeError("no CUPTI")


args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
    profile.start = cannot_start
train(engine, args.steps)
