"""The scratch folders of plans that were killed."""

import os
from pathlib import Path

from flows.plan_to_end import _hold, remove_left_scratch


def test_only_an_old_folder_that_no_plan_holds_is_removed(tmp_path: Path) -> None:
    killed, running, new, other = (tmp_path / f"zerotune-plan-{name}" for name in ("a", "b", "c", "d"))
    for folder in (killed, running, new):
        folder.mkdir()
        (folder / "file").touch()
    other.symlink_to(tmp_path / "elsewhere")
    for folder in (killed, running):
        os.utime(folder, (1e9, 1e9))
    held = _hold(running)
    assert held is not None
    remove_left_scratch(tmp_path)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["b", "c", "d"]
    os.close(held)
