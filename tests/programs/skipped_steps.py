"""Gradients of every second step, or of all, are not finite, though the loss is: DeepSpeed skips such a step.

The loss of the n-th step, counted from 1, is n.
"""

import deepspeed
import torch
from toy import batches, parse_arguments, small_model

args = parse_arguments(skips="odd")
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for count, (inputs, _) in enumerate(batches(engine.train_micro_batch_size_per_gpu(), engine.device), start=1):
    output = engine(inputs).sum()
    zero = torch.sqrt(0.0 * output) if args.skips == "all" or count % 2 == 1 else 0.0 * output
    engine.backward(zero + count)
    engine.step()
