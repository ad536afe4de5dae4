"""A table of patches is walked once, when its libraries are there, and put back in reverse order."""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from zerotune.trial_lib.rank.patching import Change, Patch, always, around, installed


class Owner:
    def own(self) -> str:
        return "own"


class Child(Owner):
    """Has its parent's method."""


def say(text: str = "plain") -> str:
    return text


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    made, user = ModuleType("a_library"), ModuleType("a_user")
    made.__dict__.update(say=say, Owner=Owner, Child=Child)
    user.__dict__.update(say=say, told=say)
    for each in (made, user):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return made


def test_a_function_is_replaced_under_its_names_and_put_back(library: Any) -> None:
    user: Any = sys.modules["a_user"]
    with installed([Patch("a_library", "say", "", around(lambda say, text: say(f"<{text}>")), aliases="told")]):
        assert (library.say("a"), user.say("a"), user.told("a")) == ("<a>", "<a>", "<a>")
        with installed([Patch("a_library", "say", "", around(lambda say, text: say(f"({text})")))]):
            assert library.say("a") == "<(a)>"
        assert library.say("a") == "<a>"
    assert (library.say, user.say, user.told) == (say, say, say)


def test_an_inherited_method_is_gone_from_the_child_afterwards(library: Any) -> None:
    row = Patch("a_library", "Owner.own Child.own", "", lambda original, given: lambda self: given)
    with installed([row], "given"):
        assert (Owner().own(), Child().own()) == ("given", "given")
    assert (Owner().own(), Child().own(), "own" in vars(Child)) == ("own", "own", False)


def test_what_a_version_lacks_is_left_out_only_where_the_row_says_so(library: Any) -> None:
    names = "missing Owner.missing none.missing"
    with installed([Patch("a_library", names, "", always(1), may_lack=True)]):
        assert not hasattr(library, "missing")
    for name in names.split():
        with pytest.raises(AttributeError), installed([Patch("a_library", name, "", always(1))]):
            ...


def test_a_library_that_is_not_imported_waits(library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "a_late_library.py").write_text("def say(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[Any] = []
    late = "a_late_library"
    change = Change(late, "all", "", lambda module, given: seen.append((module, given)))
    with installed([Patch(late, "say", "", always(1)), change], 7):
        assert seen == []
        module = importlib.import_module(late)
        monkeypatch.delitem(sys.modules, late)
        assert (module.say(), seen) == (1, [(module, 7)])
    importlib.import_module(late)
    monkeypatch.delitem(sys.modules, late)
    assert len(seen) == 1
