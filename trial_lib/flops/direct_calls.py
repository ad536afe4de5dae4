"""Calls of an engine's model past the engine."""

from collections.abc import Callable
from typing import Any

import torch


class DirectCalls:
    """Notes the calls of a model, compiled or not, until `remove`.

    A hook of a model that is compiled in place (`model.compile()`, `engine.compile()`) is compiled with it: it breaks
    the graph, or stops a program that wants a single one. There the call itself is noted, before what is compiled.

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
        # Past `__setattr__`: a model that `torch.compile` has wrapped hands on what is set.
        vars(module)["compile"] = self._compiling

    def remove(self) -> None:
        """Leaves the model as it was; harmless when it is."""
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
