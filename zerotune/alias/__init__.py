"""The name `trial_lib`, which trial classes import. It gives the modules of `zerotune.trial_lib`, never copies of them.

The wheel has this file as the package `trial_lib` too. In the repository the folder of that name leads here.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotune.trial_lib import *  # noqa: F403

_ALIAS, _HOME = "trial_lib", "zerotune.trial_lib"


class _Loader:
    def __init__(self, home: ModuleSpec) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._home.name)

    def exec_module(self, module: ModuleType) -> None:
        # It has run under its own name. The machinery has written the alias's spec into it.
        module.__spec__ = self._home

    def get_code(self, _: str) -> CodeType | None:
        """For `python -m trial_lib.training`."""
        loader: Any = self._home.loader
        code: CodeType | None = loader.get_code(self._home.name)
        return code


class _Finder:
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # A package of the user's may have the name too.
        if not name.startswith(f"{_ALIAS}.") or sys.modules.get(_ALIAS) is not sys.modules[_HOME]:
            return None
        home = importlib.util.find_spec(name.replace(_ALIAS, _HOME, 1))
        if home is None:
            return None
        loader: Any = _Loader(home)
        is_package = home.submodule_search_locations is not None
        return importlib.util.spec_from_loader(name, loader, origin=home.origin, is_package=is_package)


sys.meta_path.insert(0, _Finder())
sys.modules[_ALIAS] = importlib.import_module(_HOME)
