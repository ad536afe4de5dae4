"""What the doctor says of shared memory, of folders and of the clock."""

import os
from pathlib import Path

import pytest

from zerotune.trial_lib import doctor
from zerotune.trial_lib.doctor import HOST_LOCKS as LOCKS
from zerotune.trial_lib.doctor import (
    STUDIES,
    Verdict,
    check_clock,
    check_layers,
    check_shared_memory,
    check_write_access,
)
from zerotune.trial_lib.messages import shared_segments

GIB = 2**30


class Usage:
    """A disk of a size."""

    def __init__(self, free: int) -> None:
        self.total, self.free = 100 * GIB, free


@pytest.mark.parametrize(("free", "verdict"), [(80 * GIB, Verdict.OK), (GIB, Verdict.WARN), (GIB // 10, Verdict.FAIL)])
def test_little_room_is_told(free: int, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(free))
    (check,) = check_write_access({STUDIES: tmp_path / "not" / "there" / "yet"})
    assert check.verdict is verdict
    assert not (tmp_path / "not").exists()


def test_a_folder_that_cannot_be_written_is_told_with_the_way_round(tmp_path: Path) -> None:
    # A file where a folder would have to be: a superuser may write everywhere else.
    (tmp_path / "file").write_text("")
    (check,) = check_write_access({STUDIES: tmp_path / "file" / "zerotune-studies"})
    assert check.verdict is Verdict.FAIL
    assert str(tmp_path / "file") in check.said
    assert "can write to" in check.remedy


def test_a_folder_behind_one_that_may_not_be_looked_into_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    (check,) = check_write_access({STUDIES: tmp_path / "zerotune-studies"})
    assert check.verdict is Verdict.FAIL
    assert "Permission denied" in check.said


def test_small_shared_memory_is_told_with_the_ways_to_enlarge_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_segments, "FOLDER", tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(64 * 2**20))
    check = check_shared_memory()
    assert check.verdict is Verdict.FAIL
    assert "64 MiB free" in check.said
    assert "--shm-size" in check.remedy


def test_buffers_that_dead_ranks_left_in_shared_memory_are_told_and_those_in_use_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mmap

    monkeypatch.setattr(shared_segments, "FOLDER", tmp_path)
    monkeypatch.setattr(shared_segments, "are_all_holders_seen", lambda: True)
    dead, alive = (tmp_path / f"deepspeed_allreduce_buffer_0_127.0.0.1_{port}_0" for port in (1, 2))
    connecting = tmp_path / "nccl-aT3xkQ"
    for buffer in (dead, alive, connecting):
        buffer.write_bytes(b"0" * mmap.PAGESIZE)
    with alive.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        check = check_shared_memory()
    assert check.verdict is Verdict.WARN
    assert set(check.remedy.split()) == {"rm", str(dead), str(connecting)}
    assert "2 buffers" in check.said
    assert dead.stat().st_uid == os.getuid()


@pytest.mark.parametrize(
    ("server_time", "verdict", "word"),
    [
        (None, Verdict.OK, "no Prefect server"),
        (1000.0, Verdict.OK, "agrees"),
        (970.0, Verdict.WARN, "30 s ahead of"),
        (1090.0, Verdict.WARN, "90 s behind"),
    ],
)
def test_a_clock_that_differs_from_the_servers_is_told(
    server_time: float | None, verdict: Verdict, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_CLOCK_S", 0.01)
    monkeypatch.setattr(doctor.time, "sleep", lambda _: None)
    monkeypatch.setattr(doctor.time, "time", lambda: 1000.0)
    monkeypatch.setattr(doctor.time, "monotonic", lambda: 1.0)
    check = check_clock(server_time, 1000.0)
    assert check.verdict is verdict
    assert word in check.said


def test_a_clock_that_is_set_while_it_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1000.0, 1003.0])
    monkeypatch.setattr(doctor.time, "sleep", lambda _: None)
    monkeypatch.setattr(doctor.time, "time", lambda: next(readings))
    check = check_clock(None, 0.0)
    assert check.verdict is Verdict.WARN
    assert "while it ran" in check.said


def test_a_place_where_no_folder_of_locks_can_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "locks").touch()
    (check,) = check_write_access({LOCKS: tmp_path / "locks"})
    assert check.verdict is Verdict.FAIL
    assert "cannot be kept there (File exists)" in check.said
    assert "chmod 1777" in check.remedy


def test_a_host_without_layers_is_a_warning_that_says_what_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerotune.trial_lib.doctor.layer_refusal", lambda folder: "Operation not permitted")
    check = check_layers(tmp_path)
    assert check.verdict is Verdict.WARN
    assert "Operation not permitted" in check.said
    assert "find, git, rm" in check.said
