"""`zerotune apply`: the edits of an answer in the user's own files, or none of them."""

import codecs
import errno
import os
from pathlib import Path

import pytest

from zerotune.flows import apply
from zerotune.flows.apply import apply_command
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import FileChange, OwnCommand, StudyPaths

BEFORE, AFTER = "# mine\nbatch: 4\r\n", "# mine\nbatch: 16\r\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file of a study whose answer changes it, and adds another."""
    monkeypatch.setattr(apply, "find_study", lambda study, folder: tmp_path / "study")
    path = tmp_path / "conf.yaml"
    path.write_bytes(BEFORE.encode())
    path.chmod(0o640)
    own = OwnCommand(
        folder=str(tmp_path),
        words=("train", "study/best/conf.yaml"),
        variables={"RANKS": "2"},
        changes=(
            FileChange(path=str(path), before=BEFORE, after=AFTER),
            FileChange(path=str(tmp_path / "new.json"), before=None, after="{}\n"),
        ),
        applied=("train", "conf.yaml"),
    )
    paths = StudyPaths(tmp_path / "study")
    paths.best.mkdir(parents=True)
    paths.own_command.write_text(own.model_dump_json())
    return path


def test_the_files_get_the_answer_and_keep_their_modes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert apply_command(None, backup=False) == 0
    assert file.read_bytes() == AFTER.encode()
    assert file.stat().st_mode & 0o777 == 0o640
    assert (file.parent / "new.json").read_text() == "{}\n"
    assert {each.name for each in file.parent.iterdir()} == {"conf.yaml", "new.json", "study"}
    shown = capsys.readouterr()
    assert "--- conf.yaml\n+++ conf.yaml\n@@ -2 +2 @@\n-batch: 4\n+batch: 16" in shown.out
    assert "Train with it: RANKS=2 train conf.yaml" in shown.err


def test_a_backup_is_the_file_as_it_was(file: Path) -> None:
    apply_command(None, backup=True)
    assert file.with_name("conf.yaml.before-zerotune").read_bytes() == BEFORE.encode()
    assert file.read_bytes() == AFTER.encode()


def test_a_byte_order_mark_stays(file: Path) -> None:
    file.write_bytes(codecs.BOM_UTF8 + BEFORE.encode())
    apply_command(None, backup=False)
    assert file.read_bytes() == codecs.BOM_UTF8 + AFTER.encode()


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (BEFORE + "x: 1\n", "this file has changed since the study began"),
        (AFTER, "this file has the answer already"),
        (None, "this file has changed since the study began"),
    ],
)
def test_if_a_file_has_changed_none_is_written(file: Path, now: str | None, said: str) -> None:
    if now is None:
        file.unlink()
    else:
        file.write_bytes(now.encode())
    with pytest.raises(InputError, match=said) as refused:
        apply_command(None, backup=True)
    assert str(file) in str(refused.value)
    assert not (file.parent / "new.json").exists()
    assert now is None or file.read_bytes() == now.encode()


def all_files(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """The files beside the study, with hidden ones: content, mode and inode by name."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    return {path.name: (path.read_bytes(), path.stat().st_mode, path.stat().st_ino) for path in files}


@pytest.fixture
def second(file: Path) -> Path:
    """A second file that the answer changes, after the first one."""
    path = file.with_name("ds_config.json")
    path.write_text("{}\n")
    paths = StudyPaths(file.parent / "study")
    own = OwnCommand.model_validate_json(paths.own_command.read_text())
    change = FileChange(path=str(path), before="{}\n", after='{"bf16": {}}\n')
    paths.own_command.write_text(own.model_copy(update={"changes": (*own.changes, change)}).model_dump_json())
    return path


@pytest.mark.parametrize("backup", [True, False])
def test_a_read_only_file_leaves_all_as_they_are(file: Path, second: Path, backup: bool) -> None:
    second.chmod(0o444)
    before = all_files(file.parent)
    with pytest.raises(InputError, match=r"it is read-only\. No file has changed") as refused:
        apply_command(None, backup=backup)
    assert str(second) in str(refused.value)
    assert all_files(file.parent) == before


@pytest.mark.parametrize("backup", [True, False])
def test_a_disk_that_is_full_leaves_all_as_they_are(
    file: Path, second: Path, backup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, sync, left = all_files(file.parent), os.fsync, [2]

    def fills_up(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fills_up)
    with pytest.raises(InputError, match=r"No space left on device\. No file has changed"):
        apply_command(None, backup=backup)
    assert all_files(file.parent) == before


@pytest.mark.parametrize("backup", [True, False])
@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()])
def test_what_fails_among_the_renamings_is_taken_back(
    file: Path, second: Path, backup: bool, fails: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename, renamed = all_files(file.parent), Path.replace, []

    def breaks(path: Path, target: Path) -> Path:
        renamed.append(target)
        if len(renamed) > fails:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", breaks)
    with pytest.raises(InputError if isinstance(error, OSError) else KeyboardInterrupt):
        apply_command(None, backup=backup)
    assert len(renamed) == fails + 1
    assert all_files(file.parent) == before


def test_a_link_stays_one_and_its_file_is_written(file: Path) -> None:
    (file.parent / "shared").mkdir()
    real = file.rename(file.parent / "shared" / "real.yaml")
    file.symlink_to(real)
    apply_command(None, backup=True)
    assert file.is_symlink()
    assert real.read_bytes() == AFTER.encode()
    assert real.with_name("real.yaml.before-zerotune").read_bytes() == BEFORE.encode()
    assert {path.name for path in file.parent.glob("*")} == {"conf.yaml", "new.json", "shared", "study"}


def test_two_names_of_one_file_are_refused(file: Path, second: Path) -> None:
    second.unlink()
    second.symlink_to(file)
    with pytest.raises(InputError, match="some of these files are one"):
        apply_command(None, backup=False)
    assert file.read_bytes() == BEFORE.encode()


def test_where_a_file_can_have_no_second_name_it_is_copied(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuses)
    apply_command(None, backup=True)
    assert file.with_name("conf.yaml.before-zerotune").read_bytes() == BEFORE.encode()
    assert file.read_bytes() == AFTER.encode()


def test_an_older_backup_is_not_written_over(file: Path) -> None:
    file.with_name("conf.yaml.before-zerotune").touch()
    with pytest.raises(InputError, match="this backup is there already"):
        apply_command(None, backup=True)
    assert file.read_bytes() == BEFORE.encode()


def test_a_study_whose_answer_is_in_the_code_says_where_to_look(file: Path) -> None:
    StudyPaths(file.parent / "study").own_command.unlink()
    with pytest.raises(InputError, match="no edit of your files") as refused:
        apply_command(None, backup=False)
    assert "best_command.txt" in refused.value.remedy
