"""The modules that a rank has imported, for a fork server that is to have imported them before its forks."""

import os
import site
import sys
import sysconfig
from pathlib import Path


def imported_modules() -> list[str]:
    """Returns the installed modules that this rank has imported, in the order of their import.

    The user's own modules are left out. They may read the rank or a mapped variable at import, so each rank imports
    them itself.
    """
    standard = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    folders = {*standard, *site.getsitepackages(), site.getusersitepackages()}
    installed = tuple({f"{spelt}{os.sep}" for folder in folders for spelt in (folder, os.path.realpath(folder))})
    ours = f"{Path(__file__).resolve().parents[1]}{os.sep}"
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return [
        name
        for name, file in files
        if name != "__main__" and isinstance(file, str) and file.startswith(installed) and not file.startswith(ours)
    ]
