"""Calls back when the user's program imports a module, so that a module that it does not use costs nothing."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_Call = Callable[[ModuleType], None]


def when_imported(name: str, call: _Call) -> None:
    """Calls back with a module: at once if it is imported (in the fork server), else after its import.

    If an import fails, the call comes after a later import that succeeds.

    Args:
        name: the module's full name, such as `transformers.training_args`.
        call: the callback. The import raises its exceptions.
    """
    module = sys.modules.get(name)
    if module is not None:
        call(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(call)


class _Finder(MetaPathFinder):
    """A finder that lets the other finders find a module, and adds the callback to its loading."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[_Call]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of the other finders; None for a module that has no callback."""
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
        """Calls back after the module's code. The loader keeps its type, because other code may look at it later."""
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
