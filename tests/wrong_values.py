"""Values that a document should not have, at each of its places."""

import copy
from collections.abc import Iterator
from typing import Any

WRONG = (None, {"a": None}, "", "x" * 5000, -1, 10**400, float("nan"))

Place = tuple[Any, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yields the place of each value in a document. The items of a list are alike, so the first one counts."""
    yield at
    within = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, part in within:
        yield from places(part, (*at, key))


def changed(document: Any, at: Place, wrong: Any) -> Any:
    if not at:
        return wrong
    document = copy.copy(document)
    document[at[0]] = changed(document[at[0]], at[1:], wrong)
    return document
