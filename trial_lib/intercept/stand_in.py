"""Putting a function in the place of another one, under all its names."""

import sys
from collections.abc import Callable
from typing import Any


def stand_in(name: str, original: Any, replacement: Callable[..., Any]) -> None:
    """Puts a function in the place of another one, also where a primed module has bound it to a name of its own."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)
