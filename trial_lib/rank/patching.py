"""Replacing functions under all their names, and when a program imports their module."""

import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The names under which every rank replaces functions before the program runs.
OF_RANKS = (
    *("open", "_builtin_open", "bltn_open", "rmtree", "save", "load", "safe_open"),
    *("initialize", "destroy_process_group", "init_process_group", "start_processes"),
)
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


def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replaces a function of a class or a module by `call`, which gets the original before its arguments."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: call(original, *args, **kwargs)))


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
    if name not in _noted:
        return list(sys.modules.values())
    # Python keeps the modules in the order of their imports.
    newer = itertools.takewhile(lambda imported: imported[0] != _newest, reversed(sys.modules.items()))
    return [*_noted[name], *(module for _, module in newer)]


# Callbacks of imports, so that a module that the program does not use costs nothing

_Call = Callable[[ModuleType], None]


def when_imported(name: str, call: _Call) -> None:
    """Calls back with a module: at once if it is imported (in the fork server), else after its import.

    If an import fails, the call comes after a later import that succeeds. The import raises the callback's exceptions.
    """
    module = sys.modules.get(name)
    if module is not None:
        call(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(call)


class _Finder(MetaPathFinder):
    # Lets the other finders find a module, and adds the callback to its loading.

    def __init__(self) -> None:
        self.waiting: dict[str, list[_Call]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._call_after(spec)
        return spec

    def _call_after(self, spec: ModuleSpec) -> None:
        # Calls back after the module's code. The loader keeps its type, because other code may look at it later.
        loader = spec.loader
        assert loader is not None
        exec_module = loader.exec_module

        def exec_and_call(module: ModuleType) -> None:
            del loader.exec_module
            exec_module(module)
            for call in self.waiting.pop(spec.name, []):
                call(module)

        loader.exec_module = exec_and_call  # type: ignore[method-assign]


_finder = _Finder()
