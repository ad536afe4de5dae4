"""Hyperparameters as Determined writes them: `{type: const, val: 0.1}` is a value, `{type: log, ...}` a range. Pure."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

_CONST = {"type", "val"}
# The keys that a range of each type has to have: `{type: Adam, params: ...}` is the user's own mapping.
_RANGES = {
    "int": {"minval", "maxval"},
    "double": {"minval", "maxval"},
    "log": {"minval", "maxval"},
    "categorical": {"vals"},
}
_ONE_VALUE = "Write the one value to train with."
_OF_DEEPSPEED = "Write your value. The search varies it, within `search_space` if you name it there."


def plain_value(value: Any) -> Any:
    """Returns a hyperparameter with every constant in it, at any depth, replaced by its value.

    Raises:
        PydanticCustomError: it contains a range, which is not one value to train with.
    """
    return _plain(value, "", _ONE_VALUE)


def plain_deepspeed_value(value: Any) -> Any:
    """Returns DeepSpeed's part of the hyperparameters, as `plain_value` does."""
    return _plain(value, "", _OF_DEEPSPEED)


def _plain(value: Any, place: str, remedy: str, holders: tuple[int, ...] = ()) -> Any:
    if not isinstance(value, Mapping) or id(value) in holders:  # an alias may point back to what holds it
        return value
    kind = value.get("type")
    if kind == "const" and value.keys() == _CONST:
        return value["val"]
    if isinstance(kind, str) and kind in _RANGES and _RANGES[kind] <= value.keys():
        name = f"{place} is" if place else "this is"
        what = f"{name} a range of type {kind}, but one training has one value"
        raise PydanticCustomError("range", "{what}", {"what": what, "remedy": remedy})
    dotted = f"{place}." if place else ""
    return {key: _plain(item, f"{dotted}{key}", remedy, (*holders, id(value))) for key, item in value.items()}
