"""What is shown of a study or a plan, without control characters that a terminal would obey.

Its owner's terminal shows the secrets that the owner has typed. A page, which people pass on, does not.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel

from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.wire.plain_text import plain

View = TypeVar("View")


def shown_view(view: View, secrets: KnownSecrets | None) -> View:
    """Returns a view or a record without secrets and control characters, at any depth. Names of settings stay."""
    shown: View = _shown(view, secrets)
    return shown


def _shown(value: Any, secrets: KnownSecrets | None) -> Any:
    if isinstance(value, str):
        if isinstance(value, Enum):
            return value
        return plain(value) if secrets is None else secrets.hide(plain(value))
    if isinstance(value, Mapping):
        return {_shown(name, None): _shown(inner, secrets) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shown(inner, secrets) for inner in value)
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _shown(inner, secrets) for name, inner in value})
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _shown(getattr(value, one.name), secrets) for one in fields(value)})
    return value
