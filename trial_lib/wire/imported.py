"""What a program has imported, so that a fork server can import it ahead. A rank imports this module."""

import os
import site
import sysconfig
from collections.abc import Sequence

Import = str | dict[str, str | None]
"""A module; a statement that imports; or environment variables that the program sets before the next ones, where None
removes one."""


def modules_in(imported: Sequence[Import]) -> list[str]:
    """Returns the modules alone, in their order."""
    return [each for each in imported if isinstance(each, str)]


def installed_folders() -> tuple[str, ...]:
    """Returns the folders of installed modules, with a separator at their ends, as this interpreter may spell them."""
    standard = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    folders = {*standard, *site.getsitepackages(), site.getusersitepackages()}
    return tuple({f"{spelt}{os.sep}" for folder in folders for spelt in (folder, os.path.realpath(folder))})
