"""Hyperparameters as a dict with attributes. Pure."""

import difflib
from collections.abc import Mapping
from typing import Any


class AttrDict(dict[str, Any]):
    """A dict whose keys are attributes too: `hparams.lr` is `hparams["lr"]`.

    It serves as the `args` of `deepspeed.initialize`. Mappings in it, also those in lists, become `AttrDict`s when they
    are put in. An object that is appended to a list afterwards stays unchanged. A key with the name of an attribute of
    dict (`items`, `update`, ...) can only be reached by index.

    It takes the arguments of `dict`.
    """

    # Without a __dict__ nothing but a key can be an attribute.
    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets a key. Mappings in the value become `AttrDict`s."""
        super().__setitem__(key, _readable(value))

    def __getattr__(self, name: str) -> Any:
        """Returns the value of a key that is no attribute of dict.

        Raises:
            AttributeError: there is no such key. The message names the nearest known ones.
        """
        try:
            return self[name]
        except KeyError:
            raise AttributeError(self._unknown(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a key.

        Raises:
            AttributeError: dict has an attribute of this name, so the key could not be read as one.
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
        """Returns the union as an AttrDict. dict's own would be a plain dict."""
        if not isinstance(other, dict):
            return NotImplemented
        merged = self.copy()
        merged.update(other)
        return merged

    def __ior__(self, other: Any) -> "AttrDict":  # type: ignore[override]
        """Sets the other's keys, as `update`. dict's own would leave its mappings unchanged."""
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
        """Returns the value of a key, which is set to `default` if it is missing."""
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
