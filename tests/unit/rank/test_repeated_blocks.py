"""The repeated blocks of a model that are worth recomputing: those that keep something between inputs and outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import GELU, GRU, Conv2d, Dropout, Embedding, LayerNorm, Linear, ReLU, Sequential

from zerotune.trial_lib.rank.model_transforms import find_checkpointing as find
from zerotune.trial_lib.rank.model_transforms import repeated_blocks
from zerotune.trial_lib.rank.model_transforms import turn_checkpointing as turn


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


class Layer(torch.nn.Module):
    """A residual layer around any module."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = LayerNorm(4), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.inner(self.norm(x)))


class Dense(Layer):
    """A layer with one network."""

    def __init__(self) -> None:
        super().__init__(network())


class Mixture(torch.nn.Module):
    """Many experts of several operations, each for a part of the tokens."""

    def __init__(self, experts: int = 8, container: type = torch.nn.ModuleList) -> None:
        super().__init__()
        self.router = Linear(4, experts)
        named = {str(number): network() for number in range(experts)}
        self.experts = container(named if container is torch.nn.ModuleDict else named.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = self.experts.values() if isinstance(self.experts, torch.nn.ModuleDict) else self.experts
        weights = self.router(x).softmax(-1)
        return torch.stack([weights[..., [i]] * expert(x) for i, expert in enumerate(experts)]).sum(0)


class Stage(torch.nn.Module):
    """Several layers and a projection, as in a Swin transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.down = torch.nn.ModuleList(Dense() for _ in range(3)), Linear(4, 4)


def network() -> torch.nn.Module:
    return Sequential(Linear(4, 8), GELU(), Linear(8, 4))


def layers(count: int = 2) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(Dense() for _ in range(count))


@pytest.mark.parametrize("container", [torch.nn.ModuleList, torch.nn.ModuleDict])
def test_of_a_mixture_the_layers_are_meant_and_not_their_experts(container: type) -> None:
    blocks = torch.nn.ModuleList(Layer(Mixture(container=container)) for _ in range(2))
    model = torch.nn.ModuleDict({"layers": blocks, "head": Linear(4, 9)})
    assert repeated_blocks(model) == list(blocks)


def test_of_a_mixture_whose_layers_take_turns_all_layers_are_meant() -> None:
    class Routed(Layer):
        def __init__(self) -> None:
            super().__init__(Mixture())

    blocks = torch.nn.ModuleList([Dense(), Routed(), Dense(), Routed()])
    assert repeated_blocks(torch.nn.ModuleDict({"layers": blocks})) == list(blocks)


def test_of_an_encoder_and_a_decoder_the_layers_of_both_are_meant() -> None:
    class Decoding(Layer):
        def __init__(self) -> None:
            super().__init__(network())

    encoder, decoder = layers(3), torch.nn.ModuleList(Decoding() for _ in range(2))
    model = torch.nn.ModuleDict({"shared": Embedding(9, 4), "encoder": encoder, "decoder": decoder})
    assert repeated_blocks(model) == [*encoder, *decoder]


def test_layers_by_name_are_layers() -> None:
    blocks = torch.nn.ModuleDict({f"layer_{number}": Dense() for number in range(3)})
    assert repeated_blocks(torch.nn.ModuleDict({"tokens": Embedding(9, 4), "layers": blocks})) == list(blocks.values())


def test_the_blocks_within_stages_are_meant() -> None:
    stages = torch.nn.ModuleList(Stage() for _ in range(2))
    assert repeated_blocks(stages) == [block for stage in stages for block in stage.get_submodule("blocks").children()]


def test_small_parts_of_a_layer_that_normalise_do_not_make_it_a_stage() -> None:
    class Clones(Layer):
        def __init__(self) -> None:
            super().__init__(network())
            self.sublayers = torch.nn.ModuleList(Sequential(LayerNorm(4), Dropout(0.1)) for _ in range(2))

    blocks = torch.nn.ModuleList(Clones() for _ in range(2))
    assert repeated_blocks(torch.nn.ModuleDict({"layers": blocks})) == list(blocks)


def test_of_a_convolutional_net_blocks_that_keep_statistics_are_not_recomputed_and_the_others_are() -> None:
    def block(norm: torch.nn.Module) -> torch.nn.Module:
        return Sequential(Conv2d(4, 4, 3), norm, ReLU())

    batch = Sequential(*(block(torch.nn.BatchNorm2d(4)) for _ in range(3)))
    group = Sequential(*(block(torch.nn.GroupNorm(2, 4)) for _ in range(2)))
    assert repeated_blocks(Sequential(batch, group, Linear(4, 2))) == [*batch, *group]
    assert "keep statistics" in find(torch.nn.ModuleDict({"trunk": batch})).reason
    model = torch.nn.ModuleDict({"stem": batch, "trunk": group})
    assert "full" in find(model).values
    turn(model, "full")
    assert ["forward" in vars(each) for each in (*batch, *group)] == [False] * 3 + [True] * 2
