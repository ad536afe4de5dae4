"""Trains with DeepSpeed; the size of its batches is an environment variable."""

import argparse
import os

from deepspeed import add_config_arguments, initialize
from stopwatch import Stopwatch

from model import LanguageModel, batches

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", "30")))
args = add_config_arguments(parser).parse_args()

size = int(os.environ.get("BATCH_SIZE", "4"))
model = LanguageModel()
engine, *_ = initialize(args=args, model=model, model_parameters=model.parameters())
data, stopwatch = batches(size), Stopwatch()
micro_batches = 0
while engine.global_steps < args.steps:
    loss = engine(next(data).to(engine.device))
    engine.backward(loss)
    engine.step()
    micro_batches += 1
    if micro_batches % engine.gradient_accumulation_steps() == 0:
        stopwatch.step(size * engine.gradient_accumulation_steps())
stopwatch.report()
