"""`torch.compile` put off to the first call: nothing is compiled before, and everything by its own name then."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from zerotune.trial_lib.launch.processes.fork_server import compiled_when_called

SOURCE = """
import torch

@torch.compile(backend=backend, fullgraph=True)
def inner(tensor):
    return tensor * 2

@torch.compile(backend=backend, fullgraph=True)
def outer(tensor):
    return inner(tensor) + 1
"""


class Graphs:
    """A backend of `torch.compile` that counts what it compiles, and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


@pytest.fixture
def decorated(graphs: Graphs) -> Iterator[ModuleType]:
    """A module that was imported while compilation was put off."""
    torch._dynamo.reset()
    module = ModuleType("decorated")
    module.__dict__["backend"] = graphs
    sys.modules["decorated"] = module
    with compiled_when_called():
        exec(SOURCE, module.__dict__)
    yield module
    del sys.modules["decorated"]
    torch._dynamo.reset()


def is_compiled(function: Any) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable")


def test_nothing_is_compiled_before_a_call(decorated: ModuleType) -> None:
    assert decorated.outer.__name__ == "outer"
    assert not is_compiled(decorated.outer)


def test_the_first_call_compiles_all_functions_under_all_their_names(decorated: ModuleType, graphs: Graphs) -> None:
    other = ModuleType("other")
    other.outer = bound = decorated.outer  # type: ignore[attr-defined]
    sys.modules["other"] = other
    try:
        assert bound(torch.ones(1)).item() == 3.0
    finally:
        del sys.modules["other"]
    assert graphs.count == 1, "the inner function is part of the outer one's graph, as without the delay"
    assert is_compiled(decorated.outer)
    assert is_compiled(decorated.inner)
    assert other.outer is decorated.outer
    # A name that was bound in a function or a class keeps the function of the first call.
    assert bound(torch.ones(1)).item() == 3.0
    assert graphs.count == 1


def test_modules_are_compiled_at_once_and_what_follows_the_block_as_well() -> None:
    with compiled_when_called():
        layer = torch.compile(torch.nn.Linear(1, 1))
    assert isinstance(layer, torch.nn.Module)
    assert is_compiled(torch.compile(lambda tensor: tensor))


def test_compilation_is_put_off_by_the_block_alone_also_if_an_import_fails() -> None:
    compile_now = torch.compile
    with pytest.raises(ImportError), compiled_when_called():
        raise ImportError
    assert torch.compile is compile_now
