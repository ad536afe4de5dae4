"""Records that travel as JSON between driver and rank, which run the same ZeroTune.

A key that one of them does not have is therefore a fault. A rank imports this module, so it needs only the standard
library.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

_RecordT = TypeVar("_RecordT")


def exact_record(kind: type[_RecordT], plain: Mapping[str, Any]) -> _RecordT:
    """Returns the record of a dataclass that has exactly these keys.

    Raises:
        ValueError: a key is missing or unknown.
    """
    check_keys(kind, plain)
    return kind(**plain)


def check_keys(kind: type, plain: Mapping[str, Any]) -> None:
    """Checks that a dataclass has exactly these keys.

    Raises:
        ValueError: a key is missing or unknown.
    """
    names = {each.name for each in fields(kind)}
    if faults := [
        *(f"`{name}` is missing" for name in sorted(names - plain.keys())),
        *(f"`{name}` is unknown" for name in sorted(plain.keys() - names)),
    ]:
        raise ValueError(f"{kind.__name__}: {', '.join(faults)}.")
