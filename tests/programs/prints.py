"""Prints a megabyte at every step, to both streams, and some of it from a process of its own."""

import subprocess
import sys

import deepspeed
from toy import parse_arguments, small_model, train

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(args.steps):
    train(engine, 1)
    sys.stdout.write("out \N{SNOWMAN} " + "x" * 500_000 + "\n")
    sys.stderr.write("error: " + "y" * 500_000 + "\n")
    subprocess.run(["echo", "from a child"], check=True)
