"""Ends by itself, in one of many ways, after a few steps."""

import os
import sys

import deepspeed
import torch
from toy import parse_arguments, small_model, train

args = parse_arguments(how="return")
if args.how == "before":
    sys.exit()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
train(engine, args.steps)
if args.how == "raise":
    raise ValueError("the tokenizer has no padding token\nset one")
if args.how == "raise on one":
    if args.local_rank == 1 or os.environ["RANK"] == "1":
        raise ValueError("shard 1 is corrupt")
    train(engine, 100_000)
if args.how == "destroy":
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.exit(0)
if args.how == "exit 0":
    sys.exit(0)
if args.how == "exit 3":
    sys.exit(3)
if args.how == "exit with words":
    sys.exit("No checkpoint to resume from.")
if args.how == "vanish":
    print("cannot reach the licence server", flush=True)
    os._exit(0)
