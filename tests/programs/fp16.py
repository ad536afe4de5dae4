"""Trains in fp16 with DeepSpeed's own loss scaling, on the same batches each time, and learns fast.

--by: `engine` for `engine.backward(loss)`, `scale` for `engine.scale(loss).backward()`. --power: of two, the scale that
training begins with: what is too large for fp16 makes DeepSpeed skip steps, and halve it each time.
"""

import json
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from toy import CLASSES, FEATURES, parse_arguments, small_model

args = parse_arguments(by="engine", power=16)
if get_accelerator().device_name() == "cpu":
    # DeepSpeed refuses what most processors are slow at. They compute it all the same.
    type(get_accelerator()).is_fp16_supported = lambda accelerator: True
config = json.loads(Path(args.deepspeed_config).read_text())
config["fp16"] = {"enabled": True, "initial_scale_power": args.power, "hysteresis": 1}
config["optimizer"]["params"]["lr"] = 5e-2
model = small_model()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
generator = torch.Generator().manual_seed(3)
while True:
    inputs = torch.randn(engine.train_micro_batch_size_per_gpu(), FEATURES, generator=generator)
    labels = inputs[:, :CLASSES].argmax(-1)
    # As wide as the model: the loss is fp16 as well, and scaled it may be infinite.
    loss = F.cross_entropy(engine(inputs.half().to(engine.device)), labels.to(engine.device))
    if args.by == "scale":
        engine.scale(loss).backward()
    else:
        engine.backward(loss)
    engine.step()
