"""What a program compiles is the same whether its FLOPs are counted or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from zerotune.trial_lib.rank.flops import ModelCounter, StageCounter
from zerotune.trial_lib.rank.torch_functions import compilations, forget_compiled, install

FLOPS = 2 * (2 * 4 * 8 * 16 + 2 * 4 * 16) + 2 * 4 * 8 * 16 + 2 * 4 * 16 - 2 * 4 * 8 * 16
"""Of a backward pass twice those of the forward pass, but for the gradient of the data."""


class Steps:
    """A compiled model that trains, with its passes run by a counter."""

    def __init__(self, counter: ModelCounter, **options: Any) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.graphs = 0
        self.is_dynamic = False
        self.counter = counter
        layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)]
        self._model = torch.compile(torch.nn.Sequential(*layers), backend=self._compile, **options)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        self.is_dynamic |= any(isinstance(each, torch.SymInt) for each in inputs)
        return graph.forward

    def take(self, count: int, samples: int = 4) -> None:
        """Takes steps."""
        for _ in range(count):
            loss = self.counter.forward(self._model, torch.randn(samples, 8)).sum()
            self.counter.backward(loss.backward)
            self.counter.stop()


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("kind", [ModelCounter, StageCounter])
def test_a_counted_step_leaves_what_is_compiled_as_it_is(kind: type[ModelCounter], fullgraph: bool) -> None:
    steps = Steps(kind(with_activations=True), fullgraph=fullgraph)
    steps.take(2)
    compiled = steps.graphs, compilations()
    assert compiled[0] == 1
    steps.counter.count_flops()
    steps.take(4)
    assert (steps.graphs, compilations()) == compiled
    assert steps.counter.flops == FLOPS
    # The result of each layer but the last, and the data.
    assert steps.counter.activation_bytes >= 4 * 4 * (8 + 16)


def test_what_is_first_compiled_after_a_counted_step_is_compiled_all_the_same() -> None:
    steps = Steps(ModelCounter(with_activations=False))
    torch.compile(torch.nn.Linear(8, 8), backend="eager")(torch.randn(2, 8))
    steps.counter.count_flops()
    steps.take(1)
    assert (steps.graphs, steps.counter.flops) == (0, FLOPS)
    steps.take(3)
    assert steps.graphs == 1


def test_an_engine_that_is_called_within_a_compiled_function_is_not_counted() -> None:
    install()
    counter = ModelCounter(with_activations=False)
    linear = torch.nn.Linear(8, 1)

    @torch.compile(backend="eager")
    def step(data: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        counter.forward(linear, data).sum().backward()

    counter.count_flops()
    step(torch.randn(4, 8))
    assert (counter.flops, counter.counts_flops) == (0, False)


@pytest.mark.parametrize("forgets", [True, False])
def test_what_is_forgotten_is_compiled_for_its_own_size(forgets: bool) -> None:
    steps = Steps(ModelCounter(with_activations=False))
    steps.take(2, samples=4)
    if forgets:
        forget_compiled()
    steps.take(2, samples=6)
    assert (steps.graphs, steps.is_dynamic) == (2, not forgets)
