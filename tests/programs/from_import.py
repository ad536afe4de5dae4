"""Binds DeepSpeed's function to a name of its own, and passes the configuration as a dictionary."""

import json

from deepspeed import initialize

from toy import parse_arguments, small_model, train

args = parse_arguments(config="")
with open(args.config) as file:
    config = json.load(file)
model = small_model()
engine, _, _, _ = initialize(None, model, config=config, model_parameters=model.parameters())
train(engine, args.steps)
