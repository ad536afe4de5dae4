"""Calls the loss's own `backward`, as DeepSpeed allows since 0.18."""

import deepspeed
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for inputs, labels in batches(engine.train_micro_batch_size_per_gpu()):
    loss = F.cross_entropy(engine(inputs), labels)
    loss.backward()
    engine.step()
