"""A folder below one that everybody may write to is this user's alone."""

import os
from pathlib import Path

import pytest

from trial_lib.slots.own_folder import own_folder
from trial_lib.wire.errors import InputError


def test_it_is_made_for_its_user_alone(tmp_path: Path) -> None:
    assert own_folder(tmp_path / "locks") == own_folder(tmp_path / "locks") == tmp_path / "locks"
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o700


def test_one_s_own_that_others_may_write_to_is_closed_and_keeps_its_locks(tmp_path: Path) -> None:
    (tmp_path / "slot.lock").touch()
    tmp_path.chmod(0o775)
    own_folder(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "slot.lock").exists()


def test_what_somebody_else_has_laid_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    for name in ("file", "link", "nowhere"):
        with pytest.raises(InputError, match="not a folder of yours"):
            own_folder(tmp_path / name)
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(InputError, match="theirs: it is not a folder of yours"):
        own_folder(tmp_path / "theirs")
