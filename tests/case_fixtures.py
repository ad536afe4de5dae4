"""Which cases of a test are quick. The others are long: they show the same of more kinds."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Returns the cases, all but the first `count` marked as long. A case of several parameters is a tuple."""
    return [case if number < count else _long(case) for number, case in enumerate(cases)]


def quick_only(names: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases, all but those named marked as long."""
    chosen, found = set(names), list(cases)
    assert chosen <= set(found), f"no case: {sorted(chosen - set(found))}"
    return [case if case in chosen else _long(case) for case in found]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
