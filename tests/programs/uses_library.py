"""Leaves the engine to a library."""

from toy import parse_arguments, small_model, train
from trainer_library import engine_for

args = parse_arguments()
train(engine_for(small_model(), args), args.steps)
