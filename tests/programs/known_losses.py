"""The loss of its n-th micro-batch, counted from 1, is n: a sum that does not depend on the weights."""

import deepspeed
from toy import batches, parse_arguments, small_model

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for count, (inputs, _) in enumerate(batches(engine.train_micro_batch_size_per_gpu(), engine.device), start=1):
    engine.backward(0.0 * engine(inputs).sum() + count)
    engine.step()
