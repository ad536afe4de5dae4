"""Trains with products of matrices that nobody counts: one by one, and added up.

--counted_on: `none`, or the rank that multiplies matrices as others do.
"""

import deepspeed
import torch
import torch.nn.functional as F
from toy import CLASSES, FEATURES, batches, parse_arguments


class Product(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) / inputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if args.counted_on == str(torch.distributed.get_rank()):
            return F.linear(inputs, self.weight)
        return (inputs.unsqueeze(1) * self.weight).sum(2)


args = parse_arguments(counted_on="none")
torch.manual_seed(1)
last = Product(64, CLASSES) if args.counted_on == "none" else torch.nn.Linear(64, CLASSES)
model = torch.nn.Sequential(Product(FEATURES, 64), last)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for inputs, labels in batches(engine.train_micro_batch_size_per_gpu(), engine.device):
    engine.backward(F.cross_entropy(engine(inputs), labels))
    engine.step()
