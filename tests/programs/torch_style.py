"""Calls `backward` of the loss itself, as DeepSpeed allows since 0.18.

--through: `loss`, or `outputs` for those of the model, with the gradient that the program has worked out for them.
"""

import deepspeed
import torch.nn.functional as F
from toy import CLASSES, batches, parse_arguments, small_model

args = parse_arguments(through="loss")
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for inputs, labels in batches(engine.train_micro_batch_size_per_gpu(), engine.device):
    outputs = engine(inputs)
    if args.through == "outputs":
        outputs.backward(gradient=(outputs.detach().softmax(-1) - F.one_hot(labels, CLASSES)) / len(labels))
    else:
        F.cross_entropy(outputs, labels).backward()
    engine.step()
