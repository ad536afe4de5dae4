"""`zerotune apply`: the edits of an answer in the user's own files, or none of them."""

import codecs
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
    assert [each.name for each in file.parent.glob("*.before-zerotune")] == []
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
