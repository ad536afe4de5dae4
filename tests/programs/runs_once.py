"""Makes the process group itself, which one process can do once."""

import deepspeed
import torch
from toy import parse_arguments, small_model, train

args = parse_arguments()
torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
train(engine, args.steps)
