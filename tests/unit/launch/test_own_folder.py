"""A user's folder, in one that everybody may write to, is this user's alone."""

import os
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.locks import own_folder
from zerotune.trial_lib.messages.errors import InputError

USUAL = f"zerotune-{os.getuid()}"


def test_nobody_else_may_write_to_it_or_list_it(tmp_path: Path) -> None:
    assert own_folder(tmp_path / "locks") == own_folder(tmp_path / "locks") == tmp_path / "locks" / USUAL
    assert (tmp_path / "locks" / USUAL).stat().st_mode & 0o777 == 0o711


def test_one_s_own_that_others_may_write_to_is_closed_and_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / USUAL).mkdir()
    (tmp_path / USUAL / "trials.lock").touch()
    (tmp_path / USUAL).chmod(0o775)
    assert own_folder(tmp_path).stat().st_mode & 0o777 == 0o711
    assert (tmp_path / USUAL / "trials.lock").exists()


@pytest.mark.parametrize("kind", ["file", "link", "nowhere"])
def test_what_another_user_has_laid_there_is_left_alone_and_a_folder_beside_it_is_used(
    tmp_path: Path, kind: str
) -> None:
    theirs = tmp_path / USUAL
    if kind == "file":
        theirs.touch()
    else:
        theirs.symlink_to(tmp_path if kind == "link" else tmp_path / "none")
    own = own_folder(tmp_path)
    assert own.name.startswith(f"{USUAL}.")
    assert own_folder(tmp_path) == own
    assert not (tmp_path / "none").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [USUAL, own.name]


def test_another_user_s_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zerotune-12345").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    # The folder that it makes then belongs to this test's user as well.
    assert own_folder(tmp_path).name.startswith("zerotune-12345.")


def test_where_no_folder_can_be_made_the_sentence_says_so(tmp_path: Path) -> None:
    (tmp_path / "locks").touch()
    with pytest.raises(InputError, match=r"locks: the locks of slots and ports cannot be kept there \(File exists\)"):
        own_folder(tmp_path / "locks")
