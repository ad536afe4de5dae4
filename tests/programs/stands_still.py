"""Ranks that wait for each other, for ever or for a while."""

import os
import time

import deepspeed
import torch
from toy import parse_arguments, small_model, train

args = parse_arguments(how="crossed", seconds=0)
rank = int(os.environ["RANK"])
if args.how == "alone":
    # A rendezvous of its own counts on a rank that nobody starts.
    torch.distributed.TCPStore("127.0.0.1", 0, 2, True)
deepspeed.init_distributed()
if args.how == "prepares" and rank == 0:
    # However long that takes, the others have to wait.
    ends = time.monotonic() + args.seconds
    while time.monotonic() < ends:
        os.urandom(2**20)
if args.how == "sleeps" and rank == 0:
    time.sleep(args.seconds)
torch.distributed.barrier()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
train(engine, 2)
if args.how == "crossed" and rank == 0:
    torch.distributed.all_reduce(torch.ones(5, device=engine.device))
if args.how == "crossed":
    torch.distributed.barrier()
train(engine, 1000)
