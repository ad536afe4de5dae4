"""A mixture of experts that two ranks share: each has half of them, which ZeRO's stage 3 cannot split further."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

FEATURES, HIDDEN, CLASSES = 40, 64, 12


class Routed(nn.Module):
    def __init__(self, experts: int, group: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.before = nn.Linear(FEATURES, HIDDEN)
        self.experts = MoE(HIDDEN, expert, num_experts=experts, ep_size=group, k=1, min_capacity=4)
        self.after = nn.Linear(HIDDEN, CLASSES)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, balance, _ = self.experts(F.gelu(self.before(rows)))
        return self.after(hidden), balance


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--experts", type=int, default=2)
parser.add_argument("--ranks-per-expert-group", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(6)
model = Routed(args.experts, args.ranks_per_expert_group)
groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "routed"})
rows = torch.utils.data.TensorDataset(torch.randn(6000, FEATURES), torch.randint(0, CLASSES, (6000,)))
engine, _, loader, _ = deepspeed.initialize(args=args, model=model, model_parameters=groups, training_data=rows)
micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
print("engine", micro, accumulation, engine.train_batch_size(), flush=True)
for _ in range(args.epochs):
    for inputs, labels in loader:
        inputs, labels = inputs.to(engine.device), labels.to(engine.device)
        scores, balance = engine(inputs)
        engine.backward(F.cross_entropy(scores, labels) + 0.02 * balance)
        engine.step()
