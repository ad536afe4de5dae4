"""The scratch folders of plans that were killed."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from zerotune.flows import planning
from zerotune.flows.planning import _hold, remove_left_scratch


def test_a_folder_that_no_plan_holds_is_removed(tmp_path: Path) -> None:
    killed, running, other = (tmp_path / f"zerotune-plan-{name}" for name in ("a", "b", "c"))
    for folder in (killed, running):
        folder.mkdir()
        (folder / "file").touch()
    other.symlink_to(tmp_path / "elsewhere")
    held = _hold(running)
    assert held is not None
    remove_left_scratch(tmp_path)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["b", "c"]
    os.close(held)


@pytest.mark.parametrize("moment", ["before it is opened", "before it is held", "after"])
def test_a_folder_that_another_plan_removes_before_it_is_held_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = os.open
    left = ["once"]

    def meanwhile(now: str) -> None:
        if now == moment and left:
            left.clear()
            remove_left_scratch(tmp_path)

    def open_(*arguments: Any, **options: Any) -> int:
        meanwhile("before it is opened")
        descriptor = opened(*arguments, **options)
        meanwhile("before it is held")
        return descriptor

    monkeypatch.setattr(planning.os, "open", open_)
    scratch, held = planning._new_scratch()
    meanwhile("after")
    assert [*tmp_path.iterdir()] == [scratch]
    monkeypatch.undo()
    os.close(held)
