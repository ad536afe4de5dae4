"""Each batch takes 20 ms to load; with --varies, the time goes up and down from step to step."""

import time

import deepspeed
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

args = parse_arguments(varies=0)
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step, (inputs, labels) in enumerate(batches(engine.train_micro_batch_size_per_gpu(), engine.device)):
    time.sleep(0.01 + 0.02 * (step % 2) if args.varies else 0.02)
    engine.backward(F.cross_entropy(engine(inputs), labels))
    engine.step()
