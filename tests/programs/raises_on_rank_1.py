"""Fails on one rank alone."""

import deepspeed
import torch
from toy import parse_arguments, small_model, train

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
if torch.distributed.get_rank() == 1:
    raise ValueError("only here")
train(engine, args.steps)
