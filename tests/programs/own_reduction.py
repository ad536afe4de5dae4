"""Reduces its losses in its own way: `--reduction` sums over a micro-batch, or divides once too often or not at all."""

import deepspeed
import torch
import torch.nn.functional as F
from toy import CLASSES, FEATURES, parse_arguments, small_model

args = parse_arguments(reduction="mean")
model = small_model()
samples = torch.Generator().manual_seed(3)
data = torch.utils.data.TensorDataset(
    torch.randn(4096, FEATURES, generator=samples), torch.randint(0, CLASSES, (4096,), generator=samples)
)
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
accumulation = engine.gradient_accumulation_steps()
while True:
    for inputs, labels in loader:
        labels = labels.to(engine.device)
        scores = engine(inputs.to(engine.device, next(model.parameters()).dtype))
        loss = F.cross_entropy(scores, labels, reduction="sum" if args.reduction == "sum" else "mean")
        if args.reduction == "divided_twice":
            engine.backward(loss / accumulation)
        elif args.reduction == "undivided":
            engine.backward(loss, scale_wrt_gas=False)
        elif args.reduction == "divided":
            engine.backward(loss / accumulation, scale_wrt_gas=False)
        else:
            engine.backward(loss)
        engine.step()
