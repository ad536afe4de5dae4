"""A function is replaced under all its names, in modules of the fork server and in later ones."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from zerotune.trial_lib.rank import patching as replacing
from zerotune.trial_lib.rank.patching import OF_RANKS, note_names, stand_in


def old(_: Any) -> str:
    return "old"


def new(_: Any) -> str:
    return "new"


@pytest.fixture
def module() -> Iterator[Callable[..., ModuleType]]:
    """Makes modules with some names, and forgets them and what was noted."""
    made: list[str] = []

    def make(name: str, **names: Any) -> ModuleType:
        made.append(name)
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(names)
        return sys.modules[name]

    yield make
    for name in made:
        sys.modules.pop(name, None)
    replacing._noted.clear()


@pytest.mark.parametrize("noted", [False, True])
def test_a_function_is_replaced_in_modules_from_before_and_after_the_fork_server_has_looked(
    module: Callable[..., ModuleType], noted: bool
) -> None:
    before = module("before", save=old)
    if noted:
        note_names()
    after, another = module("after", save=old), module("another", save=str)
    stand_in("save", old, new)
    assert (before.save, after.save, another.save) == (new, new, str)


def test_a_name_that_was_not_looked_for_is_replaced_everywhere(module: Callable[..., ModuleType]) -> None:
    before = module("before", start_run=old)
    note_names()
    assert "start_run" not in OF_RANKS
    stand_in("start_run", old, new)
    assert before.start_run is new


@pytest.mark.parametrize("forgotten", ["first", "last"])
def test_a_module_that_was_forgotten_since_hides_no_newer_one(
    module: Callable[..., ModuleType], forgotten: str
) -> None:
    for name in ("first", "last"):
        module(name)
    note_names()
    del sys.modules[forgotten]
    after = module("after", save=old)
    stand_in("save", old, new)
    assert after.save is new
