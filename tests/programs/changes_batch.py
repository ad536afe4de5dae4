"""Warms its global batch up: doubles it after every fourth update, up to eight times the first."""

import deepspeed
from toy import parse_arguments, small_model, train

args = parse_arguments(first=0)
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
first = args.first or engine.train_batch_size()
while True:
    wanted = first * min(8, 2 ** (engine.global_steps // 4))
    if wanted != engine.train_batch_size():
        engine.set_train_batch_size(wanted)
    train(engine, engine.gradient_accumulation_steps())
