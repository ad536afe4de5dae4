"""Lets no exception end its training, and destroys the process group in the end where told to."""

import deepspeed
import torch
from toy import parse_arguments, small_model, train

args = parse_arguments(destroys="no")
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
try:
    train(engine, args.steps)
except SystemExit:
    if args.destroys == "no":
        train(engine, args.steps)
finally:
    torch.distributed.destroy_process_group()
