"""A feed-forward network whose layers are split over the ranks of a model-parallel group, as Megatron splits them."""

import deepspeed.comm as dist
import torch
from torch import nn


class _CopyToGroup(torch.autograd.Function):
    """Every rank uses the same input, so its gradients add up."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _ReduceFromGroup(torch.autograd.Function):
    """Every rank computed a part of the sum."""

    @staticmethod
    def forward(ctx, tensor, group):
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ParallelFeedForward(nn.Module):
    """Two layers; the hidden units between them are shared out over the group."""

    def __init__(self, inputs: int, hidden: int, outputs: int, rank: int, ranks: int, group) -> None:
        super().__init__()
        self.group = group
        # All ranks draw the whole layers and keep their part: the model is the same however many ranks share it.
        whole_in, whole_out = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        part = slice(rank * hidden // ranks, (rank + 1) * hidden // ranks)
        self.weight_in = nn.Parameter(whole_in.weight[part].detach().clone())
        self.bias_in = nn.Parameter(whole_in.bias[part].detach().clone())
        self.weight_out = nn.Parameter(whole_out.weight[:, part].detach().clone())
        self.bias_out = nn.Parameter(whole_out.bias.detach().clone())
        for parameter in (self.weight_in, self.bias_in, self.weight_out):
            parameter.model_parallel = True  # DeepSpeed's norms then count it on every rank

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(_CopyToGroup.apply(inputs, self.group) @ self.weight_in.T + self.bias_in)
        return _ReduceFromGroup.apply(hidden @ self.weight_out.T, self.group) + self.bias_out
