"""Gives its GPU so many milliseconds of work in each step, and takes some itself to prepare the next one.

A training does both at once. On a processor there is nothing to give it to.
"""

import time

import deepspeed
import torch
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

MEASURED_CYCLES = 100_000_000

args = parse_arguments(device_ms=20.0, host_ms=15.0)
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())


def cycles_per_ms() -> float:
    """Returns how many cycles of `torch.cuda._sleep` the device takes for a millisecond."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(MEASURED_CYCLES)
    start.record()
    torch.cuda._sleep(MEASURED_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return MEASURED_CYCLES / start.elapsed_time(end)


cycles = int(args.device_ms * cycles_per_ms()) if engine.device.type == "cuda" else 0
for inputs, labels in batches(engine.train_micro_batch_size_per_gpu(), engine.device):
    time.sleep(args.host_ms / 1000)
    engine.backward(F.cross_entropy(engine(inputs), labels))
    if cycles:
        torch.cuda._sleep(cycles)
    engine.step()
