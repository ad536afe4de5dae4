"""The plainest training: a small model, as DeepSpeed's documentation has it."""

import deepspeed
from toy import parse_arguments, small_model, train

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
train(engine, args.steps)
