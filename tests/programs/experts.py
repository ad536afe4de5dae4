"""A layer of DeepSpeed's mixture of experts, split over `--ep_size` ranks, between two of every rank's own."""

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from toy import CLASSES, FEATURES, batches, parse_arguments

HIDDEN = 32


class Net(torch.nn.Module):
    def __init__(self, experts: int, ep_size: int) -> None:
        super().__init__()
        expert = torch.nn.Sequential(torch.nn.Linear(HIDDEN, 64), torch.nn.ReLU(), torch.nn.Linear(64, HIDDEN))
        self.first = torch.nn.Linear(FEATURES, HIDDEN)
        self.experts = MoE(HIDDEN, expert, num_experts=experts, ep_size=ep_size, k=1)
        self.last = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, balance, _ = self.experts(F.relu(self.first(inputs)))
        return self.last(hidden), balance


args = parse_arguments(ep_size=1, experts=2)
deepspeed.init_distributed()
torch.manual_seed(1)
model = Net(args.experts, args.ep_size)
groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=groups)
for inputs, labels in batches(engine.train_micro_batch_size_per_gpu(), engine.device):
    outputs, balance = engine(inputs)
    engine.backward(F.cross_entropy(outputs, labels) + 0.01 * balance)
    engine.step()
