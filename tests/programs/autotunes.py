"""A training whose configuration, in its code or in its file, still asks for DeepSpeed's own autotuner."""

import json
from pathlib import Path

import deepspeed
from toy import parse_arguments, small_model, train

args = parse_arguments(where="file")
model = small_model()
config = args.deepspeed_config
if args.where == "code":
    config = json.loads(Path(config).read_text())
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
train(engine, 20)
