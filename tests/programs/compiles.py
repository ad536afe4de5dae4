"""Trains a compiled model, and prints a line for each graph that is made of it.

--way: how it is compiled. `function` by `torch.compile`, `fullgraph` as one graph, `model` by `model.compile()`,
`engine` by `engine.compile()`, `flex` where it calls flex attention, `branch` where it calls `torch.cond`, `loop` as
the whole of a step, `eager` not at all. --recompiles_at: the optimizer steps whose batch is of another size.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from toy import FEATURES, batches, parse_arguments, small_model


def noted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend that runs a graph as it is."""
    print("graph of any size" if any(isinstance(each, torch.SymInt) for each in inputs) else "graph", flush=True)
    return graph.forward


class Model(torch.nn.Module):
    """One of the user's own: torch's are not compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = small_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inside(inputs)


class Attends(torch.nn.Module):
    """Calls an operator that is given a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = small_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # Without a gradient: torch has no backward pass of it on a CPU.
        heads = inputs.detach().view(1, 1, -1, FEATURES)
        scores = attention(heads, heads, heads, score_mod=lambda score, *_: score * 0.5)
        return self.inside(inputs + scores.view(-1, FEATURES))


class Branches(torch.nn.Module):
    """Calls an operator that is given two functions, in whose backward pass torch wants to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = small_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.inside(inputs)
        return torch.cond(output.sum() > 0, lambda each: each * 2, lambda each: each * 3, (output,))


args = parse_arguments(way="function", backend="noted", recompiles_at="")
backend: Any = noted if args.backend == "noted" else args.backend
attention = torch.compile(flex_attention, backend=backend)
model: Any = {"flex": Attends, "branch": Branches}.get(args.way, Model)()
if args.way in ("function", "fullgraph", "branch"):
    model = torch.compile(model, backend=backend, fullgraph=args.way == "fullgraph")
elif args.way == "model":
    model.compile(backend=backend)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
if args.way == "engine":
    engine.compile(backend=backend)


def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(engine(inputs), labels)


if args.way == "loop":
    loss_of = torch.compile(loss_of, backend=backend)

recompiles_at = [int(step) for step in args.recompiles_at.split(",") if step]


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size, device = engine.train_micro_batch_size_per_gpu(), engine.device
    others = batches(2 * size, device)
    for step, batch in enumerate(batches(size, device), start=1):
        # On one rank alone.
        yield next(others) if step in recompiles_at and os.environ["RANK"] == "0" else batch


for step, (inputs, labels) in zip(range(args.steps), data(), strict=False):
    print("step", step + 1, flush=True)
    engine.backward(loss_of(inputs, labels))
    engine.step()
