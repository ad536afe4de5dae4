"""Loads each micro-batch for 0.2 s before the reporting context, as loops of the Core API do."""

import time

import deepspeed
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

from zerotune import core, dsat

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
data = batches(engine.train_micro_batch_size_per_gpu(), engine.device)
with core.init() as core_context:
    for op in core_context.searcher.operations():
        for step in range(op.length):
            time.sleep(0.2)
            inputs, labels = next(data)
            with dsat.dsat_reporting_context(core_context, op, steps_completed=step):
                engine.backward(F.cross_entropy(engine(inputs), labels))
                engine.step()
