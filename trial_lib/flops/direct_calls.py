"""Calls of an engine's model that bypass the engine."""

from collections.abc import Callable
from typing import Any

import torch


class DirectCalls:
    """Records the calls of a model, compiled or not, until `remove`.

    If a model is compiled in place (`model.compile()`, `engine.compile()`), its hooks are compiled too. A hook then
    breaks the graph, or stops a program that wants a single graph. For such a model the call itself is recorded, before
    the compiled code.

    Args:
        module: the model.
        note: called before each forward pass with its arguments.
    """

    def __init__(self, module: torch.nn.Module, note: Callable[[Any], None]) -> None:
        self._module = module
        self._note = note
        self._is_on = True
        self._begin()
        self._compile = module.compile
        # This bypasses `__setattr__`, because a model that `torch.compile` has wrapped forwards what is set.
        vars(module)["compile"] = self._compiling

    def remove(self) -> None:
        """Restores the model; harmless if it is restored already."""
        if self._is_on:
            self._is_on = False
            self._end()
            vars(self._module).pop("compile", None)

    def _begin(self) -> None:
        self._called = vars(self._module).get("_compiled_call_impl")
        self._hook = None
        if self._called is None:
            self._hook = self._module.register_forward_pre_hook(self._forward, with_kwargs=True)
        else:
            vars(self._module)["_compiled_call_impl"] = self._call

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        else:
            vars(self._module)["_compiled_call_impl"] = self._called

    def _compiling(self, *args: Any, **kwargs: Any) -> None:
        self._end()
        try:
            self._compile(*args, **kwargs)
        finally:
            self._begin()

    def _forward(self, _module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._note([args, kwargs])

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        assert self._called is not None
        self._note([args, kwargs])
        return self._called(*args, **kwargs)
