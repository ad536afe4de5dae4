"""Binds DeepSpeed's function to a name of its own, and passes the configuration as a dictionary."""

import json
from pathlib import Path

from deepspeed import initialize
from toy import parse_arguments, small_model, train

args = parse_arguments(config="")
config = json.loads(Path(args.config).read_text())
model = small_model()
engine, _, _, _ = initialize(None, model, config=config, model_parameters=model.parameters())
train(engine, args.steps)
