"""Compares two views of each batch: two forward passes, one backward pass. Evaluates in between."""

import deepspeed
import torch
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for inputs, _ in batches(engine.train_micro_batch_size_per_gpu(), engine.device):
    first, second = engine(inputs), engine(inputs + 0.1 * torch.randn_like(inputs))
    engine.backward(F.mse_loss(first, second))
    engine.step()
    engine.eval()
    engine(torch.cat([inputs] * 5))
    engine.train()
    with torch.no_grad():
        engine(inputs)
