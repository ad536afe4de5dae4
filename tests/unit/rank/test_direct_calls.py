"""Calls past an engine are noted, and what is compiled stays what it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zerotune.trial_lib.rank.flops import DirectCalls
from zerotune.trial_lib.rank.torch_functions import install


class Model(torch.nn.Module):
    """One of the user's own: torch's are not compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inside(inputs).relu()


class Watched:
    """A model whose calls are noted.

    Attributes:
        graphs: that were made of it.
        noted: the size of each batch.
    """

    def __init__(self, when: str, fullgraph: bool) -> None:
        install()
        torch._dynamo.reset()
        self.graphs = 0
        self.noted: list[int] = []
        self.model: Any = Model()
        options: dict[str, Any] = {"backend": self._compile, "fullgraph": fullgraph}
        if when == "wrapped":
            self.model = torch.compile(self.model, **options)
        if when == "before":
            self.model.compile(**options)
        self.calls = DirectCalls(self.model, self._note)
        if when == "after":
            self.model.compile(**options)

    def _note(self, inputs: Any) -> None:
        # As most of what a rank does: it cannot be a part of a graph.
        torch._dynamo.graph_break()
        self.noted.append(len(inputs[0][0]))

    def _compile(self, graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize(
    ("when", "fullgraph"),
    [
        *(("before", True), ("after", True), ("wrapped", True), ("never", False)),
        *(pytest.param(when, False, marks=pytest.mark.long) for when in ("before", "after", "wrapped")),
        pytest.param("never", True, marks=pytest.mark.long),
    ],
)
def test_a_call_is_noted_and_no_graph_is_broken_by_it(when: str, fullgraph: bool) -> None:
    watched = Watched(when, fullgraph)
    for _ in range(3):
        watched.model(torch.randn(2, 4)).sum().backward()
    assert watched.noted == [2, 2, 2]
    assert watched.graphs == (when != "never")


@pytest.mark.parametrize(
    "when", ["wrapped", *(pytest.param(when, marks=pytest.mark.long) for when in ("before", "after", "never"))]
)
def test_afterwards_the_model_is_as_it_was(when: str) -> None:
    watched = Watched(when, fullgraph=True)
    for _ in range(2):
        watched.calls.remove()
    watched.model(torch.randn(2, 4))
    assert (watched.noted, watched.graphs) == ([], when != "never")
    assert "compile" not in vars(watched.model)
    assert not watched.model._forward_pre_hooks
    if when == "never":
        watched.model.compile(backend="eager")
        assert watched.model._compiled_call_impl is not None
