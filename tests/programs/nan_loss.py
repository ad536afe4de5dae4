"""Its loss is not a number from the fourth step on."""

import deepspeed
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step, (inputs, labels) in enumerate(batches(engine.train_micro_batch_size_per_gpu(), engine.device)):
    loss = F.cross_entropy(engine(inputs), labels)
    engine.backward(loss * float("nan") if step >= 3 else loss)
    engine.step()
