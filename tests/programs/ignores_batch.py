"""Feeds batches of a size of its own."""

import deepspeed
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

args = parse_arguments(batch_size=8)
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for inputs, labels in batches(args.batch_size, engine.device):
    engine.backward(F.cross_entropy(engine(inputs), labels))
    engine.step()
