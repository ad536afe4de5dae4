"""Replaces a function under all its names."""

import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

OF_RANKS = (
    *("open", "_builtin_open", "bltn_open", "rmtree", "save", "load", "safe_open"),
    *("initialize", "destroy_process_group", "init_process_group", "start_processes"),
)
"""The names under which every rank replaces functions before the program runs."""

_noted: dict[str, list[ModuleType]] = {}
_newest = ""


def note_names() -> None:
    """Notes which modules have a name of `OF_RANKS`, for the forks of this process.

    A fork that looks through all modules copies the memory page of each. With some 3,000 modules that takes 20 ms.
    """
    global _newest
    modules = list(sys.modules.values())
    for name in OF_RANKS:
        _noted[name] = [module for module in modules if name in getattr(module, "__dict__", {})]
    _newest = next(reversed(sys.modules))


def stand_in(name: str, original: Any, replacement: Callable[..., Any]) -> None:
    """Replaces a function, also in primed modules that have bound it to a name of their own."""
    for module in _modules_with(name):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)


def stand_in_for_scripts(name: str, original: Any, replacement: Callable[..., Any]) -> None:
    """Replaces a function of torch's as `stand_in` does. Code that TorchScript compiles may call it as well."""
    # Torch is there by now. Other ranks import this module before it.
    import torch

    builtin: Any = torch.jit._builtins
    operator = builtin._find_builtin(original)
    if operator is not None:
        builtin._register_builtin(replacement, operator)
    stand_in(name, original, replacement)


def _modules_with(name: str) -> list[ModuleType]:
    """Returns the modules that may have a name: those that were noted with it, and all that are newer."""
    if name not in _noted:
        return list(sys.modules.values())
    # Python keeps the modules in the order of their imports.
    newer = itertools.takewhile(lambda imported: imported[0] != _newest, reversed(sys.modules.items()))
    return [*_noted[name], *(module for _, module in newer)]
