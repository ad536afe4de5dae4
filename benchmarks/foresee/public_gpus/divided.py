"""Tensor parallelism as Megatron has it, and sequences divided as Ulysses does, for the plain decoder."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Entering(torch.autograd.Function):
    """Lets a whole input into divided matrices. Its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leaving(torch.autograd.Function):
    """Adds up what the ranks' parts of a matrix give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Exchange(torch.autograd.Function):
    """Gives each rank a part of dimension `apart` and all of dimension `together`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apart: int, together: int, group: Any) -> Tensor:
        ctx.dimensions, ctx.group = (apart, together), group
        return _exchanged(x, apart, together, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        apart, together = ctx.dimensions
        return _exchanged(gradient, together, apart, ctx.group), None, None, None


def _exchanged(x: Tensor, apart: int, together: int, group: Any) -> Tensor:
    sent = torch.stack(x.chunk(group.size(), dim=apart))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=together)


class Divided:
    """The ranks among which matrices and sequences are divided. Neighbours have the parts.

    Args:
        program: a `RowProgram`.

    Attributes:
        shards: of each matrix.
        sequence: parts of each sequence.
    """

    def __init__(self, program: Any) -> None:
        self.shards, self.sequence = program.shards, program.divided
        self._of_matrices = dist.new_group(list(range(self.shards))) if self.shards > 1 else None
        self._of_sequences = dist.new_group(list(range(self.sequence))) if self.sequence > 1 else None
        replicas = list(range(0, program.world, self.shards))
        self._replicas = dist.new_group(replicas) if self.shards > 1 else None

    def entering(self, x: Tensor) -> Tensor:
        """Returns the input of divided matrices."""
        return _Entering.apply(x, self._of_matrices) if self._of_matrices else x

    def leaving(self, x: Tensor) -> Tensor:
        """Returns the sum of what divided matrices give."""
        return _Leaving.apply(x, self._of_matrices) if self._of_matrices else x

    def heads_apart(self, x: Tensor) -> Tensor:
        """Returns (batch, some heads, all tokens, width) for (batch, all heads, some tokens, width)."""
        return _Exchange.apply(x, 1, 2, self._of_sequences) if self._of_sequences else x

    def heads_together(self, x: Tensor) -> Tensor:
        """Returns the reverse of `heads_apart`."""
        return _Exchange.apply(x, 2, 1, self._of_sequences) if self._of_sequences else x

    @property
    def mpu(self) -> "Divided | None":
        """The object that DeepSpeed asks for the groups; None without tensor parallelism."""
        return self if self._of_matrices else None

    def get_model_parallel_group(self) -> Any:
        """Returns the group of the ranks that share each matrix."""
        return self._of_matrices

    def get_model_parallel_world_size(self) -> int:
        """Returns its size."""
        return self.shards

    def get_model_parallel_rank(self) -> int:
        """Returns this rank in it."""
        return 0

    def get_data_parallel_group(self) -> Any:
        """Returns the group of the replicas, among which ZeRO partitions."""
        return self._replicas

    def get_data_parallel_world_size(self) -> int:
        """Returns its size."""
        return int(self._replicas.size()) if self._replicas else 1

    def get_data_parallel_rank(self) -> int:
        """Returns this rank in it."""
        return 0
