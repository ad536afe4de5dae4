"""Activation checkpointing that a rank turns on: which blocks it recomputes, and that the training stays the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerotune.trial_lib.rank import torch_functions
from zerotune.trial_lib.rank.model_transforms import find_checkpointing as find
from zerotune.trial_lib.rank.model_transforms import repeated_blocks
from zerotune.trial_lib.rank.model_transforms import turn_checkpointing as turn

KINDS = ("none", "full", "every_second")


class Block(torch.nn.Module):
    """A layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.linear(x)))


class Model(torch.nn.Module):
    """Four blocks, beside a shorter list."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x)).square().mean()


def trained(model: torch.nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(3)
    loss = model(torch.ones(2, 8))
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_the_same_with_dropout(kind: str) -> None:
    model = Model()
    other = copy.deepcopy(model)
    turn(other, kind)
    expected, found = trained(model), trained(other)
    assert torch.equal(expected[0], found[0])
    assert all(map(torch.equal, expected[1], found[1]))
    assert len(expected[1]) == len(found[1]) == 12


@pytest.mark.parametrize(("kind", "recomputed"), [("none", []), ("full", [0, 1, 2, 3]), ("every_second", [0, 2])])
def test_the_repeated_blocks_are_recomputed_and_every_name_stays(kind: str, recomputed: list[int]) -> None:
    model = Model()
    names = [[name for name, _ in named] for named in (model.named_modules(), model.named_parameters())]
    assert find(model).values == KINDS
    turn(model, kind)
    calls: list[int] = []
    for number, block in enumerate(model.blocks):
        block.linear.register_forward_hook(lambda *_, number=number: calls.append(number))
    trained(model)
    # The first block is compared at its first call, by two passes more, one of them recomputed.
    again = {number: calls.count(number) for number in range(4)}
    assert again == {number: 1 + (number in recomputed) + 3 * (recomputed[:1] == [number]) for number in range(4)}
    assert [[name for name, _ in named] for named in (model.named_modules(), model.named_parameters())] == names


def test_a_copy_of_a_recomputed_model_calls_its_own_blocks() -> None:
    model = Model()
    turn(model, "full")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert model(torch.ones(2, 8)) > 0
        assert other(torch.ones(2, 8)) == 0


def test_models_that_cannot_or_already_do_are_left_alone_with_a_reason() -> None:
    statistics = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),) * 2)
    for model, reason in (
        (torch.nn.Linear(2, 2), "the model has no repeated blocks"),
        (statistics, "keep statistics"),
    ):
        found = find(model)
        assert not found.values
        assert reason in found.reason
    itself = Model()
    turn(itself, "full")
    assert find(itself).reason == "your code recomputes activations by itself"


def test_the_class_that_repeats_most_is_found_in_all_its_places() -> None:
    stages = torch.nn.Sequential(
        torch.nn.Sequential(Block(), Block(), Block()), torch.nn.Sequential(Block()), torch.nn.Linear(8, 8)
    )
    assert [type(block) for block in repeated_blocks(stages)] == [Block] * 4


def test_a_block_that_is_in_two_lists_is_recomputed_once() -> None:
    model = Model()
    model.also = torch.nn.Sequential(*model.blocks)
    assert repeated_blocks(model) == list(model.blocks)
    turn(model, "every_second")
    calls: list[int] = []
    for number, block in enumerate(model.blocks):
        block.linear.register_forward_hook(lambda *_, number=number: calls.append(number))
    trained(model)
    calls.clear()
    trained(model)
    assert [calls.count(number) for number in range(4)] == [2, 1, 2, 1]


class Counting(Block):
    """Changes a buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x)


class Alternating(Block):
    """Computes something else at every other call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + self.calls % 2)


@pytest.mark.parametrize(
    ("kind", "problem"), [(Counting, "changes its buffers"), (Alternating, "other outputs or gradients")]
)
def test_a_block_that_recomputation_changes_is_refused_at_its_first_call(kind: type[Block], problem: str) -> None:
    model = Model()
    model.blocks = torch.nn.ModuleList(kind() for _ in range(4))
    turn(model, "full")
    with pytest.raises(ValueError, match=problem):
        trained(model)


class AddsInAnyOrder(torch.autograd.Function):
    """Has a backward pass that rounds otherwise at each call, as a GPU's atomic additions do."""

    calls = 0

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        AddsInAnyOrder.calls += 1
        # One unit in the last place of the largest element, which is all that the smallest have.
        return gradient + gradient.abs().max() * torch.finfo(gradient.dtype).eps * (-1) ** AddsInAnyOrder.calls


class Rounding(Block):
    """Computes in bfloat16, with other roundings at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x + self.drop(torch.relu(AddsInAnyOrder.apply(self.linear(x.bfloat16())))).to(x.dtype)


class Autocast(Block):
    """Computes a part in bfloat16, though its weights, its outputs and their gradients are float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(AddsInAnyOrder.apply(self.linear(x)).relu()).float()


@pytest.mark.parametrize("kind", [Rounding, Autocast])
def test_a_block_that_a_device_rounds_otherwise_at_each_call_is_recomputed(kind: type[Block]) -> None:
    model = Model()
    model.blocks = torch.nn.ModuleList(kind() for _ in range(4))
    turn(model, "full")
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = trained(model)
    assert torch.isfinite(loss)
    assert len(gradients) == 12


class Named(Block):
    """Has an input with a name that torch's own function has too."""

    def forward(self, x: torch.Tensor, debug: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) + (0 if debug is None else debug)


class ByName(Model):
    """Calls its blocks with named inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Named() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(debug=x, x=x)
        return x.square().mean()


def test_named_inputs_reach_a_recomputed_block_and_torch_sees_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = ByName(), []
    other = copy.deepcopy(model)
    turn(other, "full")
    own = torch.utils.checkpoint._infer_device_type

    def noted(*args: Any) -> Any:
        seen.append([type(each) for each in args])
        return own(*args)

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", noted)
    expected, found = trained(model), trained(other)
    assert torch.equal(expected[0], found[0])
    assert all(map(torch.equal, expected[1], found[1]))
    assert seen
    assert all(each == [torch.Tensor] * 2 for each in seen)


def test_a_foreseen_block_with_named_inputs_is_not_compared() -> None:
    model = ByName()
    turn(model, "full")
    calls: list[int] = []
    model.blocks[0].linear.register_forward_hook(lambda *_: calls.append(0))
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        model(fakes.from_tensor(torch.ones(2, 8))).backward()
    assert len(calls) == 2


def test_an_eager_step_between_compiled_steps_compiles_nothing_again() -> None:
    model, graphs = Model(), []
    turn(model, "full")
    torch_functions.install()

    def noted(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model.compile(backend=noted)
    trained(model)
    with torch_functions.eagerly():
        trained(model)
    trained(model)
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", [Model, ByName])
def test_recomputed_blocks_are_compiled_into_the_one_graph_of_their_model(kind: type[Model]) -> None:
    model, graphs = kind(), []
    turn(model, "full")
    torch_functions.install()

    def noted(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    model.compile(backend=noted)
    trained(model)
    assert len(graphs) == 1
    assert sum("activation_checkpoint" in each for each in graphs[0]) == 4
