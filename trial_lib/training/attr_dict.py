"""Hyperparameters that are read as a dict or as attributes. Pure."""

import difflib
from collections.abc import Mapping
from typing import Any


class AttrDict(dict[str, Any]):
    """A dict whose keys are attributes too: `hparams.lr` is `hparams["lr"]`.

    It serves as the `args` of `deepspeed.initialize`. Mappings in it, also those in lists, become `AttrDict`s when they
    are put in; what is appended to a list afterwards stays what it is. A key that is the name of one of dict's own
    attributes (`items`, `update`, ...) is reached by index only.

    Takes the arguments of `dict`.
    """

    # Without a __dict__ nothing but a key can be an attribute.
    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets a key; mappings in the value become readable."""
        super().__setitem__(key, _readable(value))

    def __getattr__(self, name: str) -> Any:
        """Called for what is not an attribute of dict.

        Raises:
            AttributeError: there is no such key; the message says which known ones are nearest.
        """
        try:
            return self[name]
        except KeyError:
            raise AttributeError(self._unknown(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a key.

        Raises:
            AttributeError: dict has an attribute of this name, so that the key could not be read as one.
        """
        if hasattr(type(self), name):
            raise AttributeError(f'"{name}" is an attribute of every dict: set it by index, hparams["{name}"] = ...')
        self[name] = value

    def __delattr__(self, name: str) -> None:
        """Removes a key.

        Raises:
            AttributeError: there is no such key.
        """
        try:
            del self[name]
        except KeyError:
            raise AttributeError(self._unknown(name)) from None

    def __or__(self, other: Any) -> Any:
        """Returns the union, readable as this one; dict's own would be a plain dict."""
        if not isinstance(other, dict):
            return NotImplemented
        merged = self.copy()
        merged.update(other)
        return merged

    def __ior__(self, other: Any) -> "AttrDict":  # type: ignore[override]
        """Sets the other's keys, as `update`; dict's own would leave its mappings as they are."""
        self.update(other)
        return self

    def copy(self) -> "AttrDict":
        """Returns a shallow copy."""
        return type(self)(self)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets several keys, as `dict.update`."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, which is set to `default` where it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, [key for key in self if isinstance(key, str)])
        hint = f"; nearest known: {', '.join(near)}" if near else ""
        return f'There is no hyperparameter "{name}"{hint}.'


def _readable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value if isinstance(value, AttrDict) else AttrDict(value)
    if isinstance(value, list):
        items = [_readable(item) for item in value]
        # A list without mappings stays the same object: a shallow copy of an AttrDict shares its values.
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value
