"""The repeated blocks of a model that are worth recomputing: those that keep something between inputs and outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import GELU, GRU, Conv2d, Dropout, Embedding, LayerNorm, Linear, ReLU, Sequential

from trial_lib.turned.activation_checkpointing import find
from trial_lib.turned.repeated_blocks import repeated_blocks


class Scaled(torch.nn.Module):
    """A user's own layer of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.ones(size)) for size in ((4, 4), (4,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Gated(Scaled):
    """A user's own layer of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (x @ self.gate).sigmoid()


class Residual(torch.nn.Module):
    """A user's own layer whose code does more than its module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.inner(torch.nn.functional.gelu(x)))


def kept(block: torch.nn.Module, x: torch.Tensor) -> int:
    """The tensors that autograd keeps of a block beside its inputs, its parameters and its outputs."""
    saved: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = block(x)
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    bounds = {each.untyped_storage().data_ptr() for each in (x, outputs, *block.parameters())}
    return len(saved.keys() - bounds)


@pytest.mark.parametrize(
    ("make", "is_worth_it"),
    [
        (lambda: Linear(4, 4), False),
        (Scaled, False),
        (lambda: Sequential(Linear(4, 4), ReLU()), False),
        (lambda: Sequential(Linear(4, 4), GELU()), True),
        (lambda: Sequential(Linear(4, 4), ReLU(), Dropout(0.5)), True),
        (lambda: Sequential(LayerNorm(4), Linear(4, 4)), True),
        (Gated, True),
        (Residual, True),
        (lambda: GRU(4, 4, batch_first=True), True),
    ],
)
def test_blocks_are_worth_it_that_keep_more_than_their_inputs_and_outputs(
    make: Callable[[], torch.nn.Module], is_worth_it: bool
) -> None:
    blocks = [make() for _ in range(3)]
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert (kept(blocks[0], x) > 0) == is_worth_it
    assert repeated_blocks(Sequential(*blocks)) == (blocks if is_worth_it else [])


def test_rows_of_single_operations_are_passed_over_for_a_shorter_row_of_blocks() -> None:
    blocks = [Sequential(Linear(4, 4), GELU()) for _ in range(2)]
    tables = torch.nn.ModuleList(Embedding(9, 4) for _ in range(26))
    parts = {"tables": tables, "trunk": Sequential(*blocks), "head": Sequential(*(Conv2d(1, 1, 1) for _ in range(5)))}
    assert repeated_blocks(torch.nn.ModuleDict(parts)) == blocks
    reason = find(Sequential(*(Linear(4, 4) for _ in range(5)))).reason
    assert reason == "the model has no repeated blocks of several operations"
