"""Replaces a function under all its names."""

import sys
from collections.abc import Callable
from typing import Any


def stand_in(name: str, original: Any, replacement: Callable[..., Any]) -> None:
    """Replaces a function, also in primed modules that have bound it to a name of their own."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)
