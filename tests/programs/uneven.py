"""Ranks with different numbers of batches: rank 1 comes to the end of its data first, and both then meet."""

import os

import deepspeed
import torch
from toy import parse_arguments, small_model, train

args = parse_arguments(rank_0=15, rank_1=10, then="meet")
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
train(engine, args.rank_1 if os.environ["RANK"] == "1" else args.rank_0)
if args.then == "meet":
    torch.distributed.all_reduce(torch.tensor([args.rank_0], device=engine.device))
