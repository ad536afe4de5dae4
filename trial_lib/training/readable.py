"""The objects that a checkpoint can hold for a rank: those that are read back without pickle."""

import io
from typing import Any

import torch


def unreadable_part(value: Any, where: str = "") -> str | None:
    """Returns the innermost part of a state that `weights_only` cannot read back, such as `callbacks.ema is a Path`.

    Args:
        value: the state, or a part of it.
        where: the keys that lead to the part.

    Returns:
        None if everything can be read back.
    """
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if not _reads_back(key):
                return f"a key of {where or 'it'} is {_kind(key)}"
            found = unreadable_part(inner, f"{where}.{key}" if where else str(key))
            if found is not None:
                return found
        if type(value) in (dict, list, tuple):
            return None
    return None if _reads_back(value) else f"{where or 'it'} is {_kind(value)}"


def _reads_back(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - a class may refuse to be pickled in words of its own
        return False
    return True


def _kind(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
