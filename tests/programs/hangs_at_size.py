"""The plainest training, which waits for ever at one micro-batch size."""

import time

import deepspeed
from toy import parse_arguments, small_model, train

args = parse_arguments(hangs_at=0)
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while engine.train_micro_batch_size_per_gpu() == args.hangs_at:
    time.sleep(1)
train(engine, args.steps)
