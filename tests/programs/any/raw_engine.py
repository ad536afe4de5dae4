"""Trains with DeepSpeed; the size of its batches is the engine's."""

import argparse

import deepspeed
from stopwatch import Stopwatch

from model import LanguageModel, batches

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=30)
args = deepspeed.add_config_arguments(parser).parse_args()

model = LanguageModel()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
size, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
data, stopwatch = batches(size), Stopwatch()
for _ in range(args.steps):
    for _ in range(accumulation):
        loss = engine(next(data).to(engine.device))
        engine.backward(loss)
        engine.step()
    stopwatch.step(size * accumulation)
stopwatch.report()
