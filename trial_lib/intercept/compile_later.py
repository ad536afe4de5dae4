"""Puts `torch.compile` off to a function's first call, while a module is imported. Runs in the user's environment.

`torch.compile` compiles at the first call, but it imports Inductor at once: hundreds of modules. DeepSpeed's Muon
decorates three functions with it. All ranks of stages 1 to 3 import Muon, and few call it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from trial_lib.intercept.stand_in import stand_in


@contextlib.contextmanager
def compiled_when_called() -> Iterator[None]:
    """Has `torch.compile` in this block return functions that are compiled when the first of them is called.

    That call replaces all of them, under all their names. Compiled code that calls another one then finds it compiled.
    """
    import torch

    compile_now = torch.compile
    waiting: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = []
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def compile_all() -> None:
        while waiting:
            function, later, options = waiting.pop()
            compiled[later] = compile_now(function, **options)
            stand_in(function.__name__, later, compiled[later])

    def compile_later(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Stands in for `torch.compile`."""
        if model is None:
            return functools.partial(compile_later, **options)
        if isinstance(model, torch.nn.Module):
            return compile_now(model, **options)

        @functools.wraps(model)
        def later(*arguments: Any, **named: Any) -> Any:
            compile_all()
            return compiled[later](*arguments, **named)

        waiting.append((model, later, options))
        return later

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now
