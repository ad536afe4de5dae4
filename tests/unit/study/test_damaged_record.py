"""A study's record that somebody, or a disk, has damaged: every command that reads it says so, and changes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import STUDY_ID, recorded_study

from zerotune.flows.records import show_command, sync_command
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.report.html_report import write_report
from zerotune.trial_lib.study.folder import begun_by, find_study, record_of
from zerotune.trial_lib.study.open_study import resume_study


def half(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def changed(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda whole: json.dumps({**json.loads(whole), **changes}).encode()


# A disk that lost its power leaves zeros.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "zeros": lambda whole: bytes(len(whole)),
    "not UTF-8": lambda whole: whole.replace(b'"name"', b'"na\xff\xfe"'),
    "UTF-16": lambda whole: whole.decode().encode("utf-16"),
    "half": half,
    "a list": lambda _: b"[]",
    "null": lambda _: b"null",
    "a text": lambda _: b'"study"',
    "a number": lambda _: b"1e999",
    "nested without end": lambda _: b"[" * 100_000,
    "a field of another type": changed(arguments=[]),
    "a field that is missing": lambda whole: whole.replace(b'"study_id"', b'"study_no"'),
    "a command that is no list": changed(arguments={"command": 1.5}),
    "a command of no words": changed(arguments={"command": [["x"]]}),
    "settings that are a list": changed(arguments={"settings": [["x"]]}),
    "a metric that nobody knows": changed(metric="speed"),
    "a folder of another type": changed(whereabouts={"path": 3}),
    "a folder that cannot be": changed(
        status="cancelled", whereabouts={"host": "h", "path": "a\0b", "inode": 1}, arguments=3
    ),
}
COMMANDS: dict[str, Callable[[Path], object]] = {
    "show": lambda root: show_command(str(root), as_json=False),
    "show --json": lambda root: show_command(str(root), as_json=True),
    "resume": resume_study,
    "sync": sync_command,
    "the report": lambda root: write_report(StudyPaths(root)),
}


def damaged(folder: Path, damage: str) -> StudyPaths:
    paths = recorded_study(folder)
    paths.record.write_bytes(DAMAGES[damage](paths.record.read_bytes()))
    return paths


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_command_says_that_a_record_is_damaged_and_changes_nothing(
    damage: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    paths = damaged(tmp_path, damage)
    before = {file: file.read_bytes() for file in paths.root.rglob("*") if file.is_file()}
    with pytest.raises(InputError) as raised:
        COMMANDS[command](paths.root)
    assert raised.value.where == str(paths.record)
    assert "record is damaged" in raised.value.what
    assert raised.value.remedy
    assert {file: file.read_bytes() for file in paths.root.rglob("*") if file.is_file()} == before
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_does_not_hide_the_other_studies(damage: str, tmp_path: Path) -> None:
    paths = damaged(tmp_path, damage)
    sound = StudyPaths(
        recorded_study(tmp_path / "elsewhere", name="sound", flow_run_id="run-1").root.rename(
            paths.root.with_name("sound-1")
        )
    )
    assert find_study("sound", tmp_path) == sound.root
    assert begun_by("run-1", [paths.record, sound.record]) == sound.root
    assert record_of(sound) is not None


def test_a_record_that_is_a_folder_is_none(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    paths.record.unlink()
    paths.record.mkdir()
    for command in COMMANDS.values():
        with pytest.raises(InputError, match="folder"):
            command(paths.root)
    assert record_of(paths) is None
    assert STUDY_ID in str(paths.root)


@pytest.mark.parametrize("max_trials", ["many", [], None])
@pytest.mark.parametrize("command", ["show", "resume"])
def test_arguments_that_were_damaged_are_told_of(max_trials: Any, command: str, tmp_path: Path) -> None:
    paths = recorded_study(tmp_path, status="cancelled", arguments={"max_trials": max_trials})
    with pytest.raises(InputError, match="damaged or of another version") as raised:
        COMMANDS[command](paths.root)
    assert raised.value.where == str(paths.record)


def test_what_a_version_with_other_arguments_has_written_is_shown_and_not_resumed(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path, status="cancelled", arguments={"max_trials": 5, "of_another_version": 1})
    assert COMMANDS["show"](paths.root) == 0
    with pytest.raises(InputError, match="another version"):
        resume_study(paths.root)
