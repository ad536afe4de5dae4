"""What a rank imports, for a fork server that is to have imported it before its forks."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.orders import Import, installed_folders
from zerotune.trial_lib.messages.secrets import redact
from zerotune.trial_lib.rank.own_place import PLACE


class ImportedModules:
    """The modules that a program imports, and the environment variables that it sets before.

    A library may read a variable when it is imported, such as `HF_HOME`. The server then has to import it with the
    program's value.
    """

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}
        self._encoded: dict[Any, Any] = {}
        self._changes: list[tuple[frozenset[str], dict[str, str | None]]] = []

    def follow(self) -> None:
        self._environment = dict(os.environ)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        # Finds no module. Python calls this before an import.
        if name.partition(".")[0] not in sys.stdlib_module_names:
            # Another thread may change the environment meanwhile. The next import shows it.
            with contextlib.suppress(KeyError, RuntimeError):
                self._look()

    def _look(self) -> None:
        # To compare the encoded values takes some microseconds, and a program has thousands of imports.
        encoded = dict(getattr(os.environ, "_data", os.environ))
        if encoded != self._encoded:
            self._encoded = encoded
            before, now = self._environment, dict(os.environ)
            names = sorted(before.keys() | now.keys())
            changed = {name: now.get(name) for name in names if before.get(name) != now.get(name) and name not in PLACE}
            self._environment = now
            if changed:
                self._changes.append((frozenset(sys.modules), changed))

    def found(self) -> list[Import]:
        """The installed modules that are imported by now, in order.

        The user's own modules are left out: they may read the rank or a mapped variable at import. So are variables
        that look like secrets, because the list is kept.
        """
        found: list[Import] = []
        changes = list(self._changes)
        for name in _installed():
            while changes and name not in changes[0][0]:
                shown = {name: value for name, value in changes.pop(0)[1].items() if _is_shown(name, value)}
                found += [shown] if shown else []
            found.append(name)
        return found


def _is_shown(name: str, value: str | None) -> bool:
    return redact({name: value})[name] == value and (value is None or value.isprintable())


def _installed() -> list[str]:
    installed = installed_folders()
    ours = f"{Path(__file__).absolute().parents[1]}{os.sep}"
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return [
        name
        for name, file in files
        if name != "__main__" and isinstance(file, str) and file.startswith(installed) and not file.startswith(ours)
    ]
