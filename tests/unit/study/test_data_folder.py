"""A home that cannot be written, that nobody knows of, or that leaves no room for processes is told in a sentence."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerotune.flows.prefect_server import is_out_of_processes
from zerotune.trial_lib.doctor import DATA, check_write_access
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.study.folder import made_in_data_folder, require_data_folder


def test_a_home_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    with pytest.raises(InputError, match=r"cannot be written .*XDG_DATA_HOME"):
        made_in_data_folder("prefect")


def test_what_is_asked_before_a_study_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    require_data_folder("prefect")
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_has_no_home_to_write_to_ends_before_there_is_a_study(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder")
    words = ["random", str(tmp_path / "e.yaml"), str(tmp_path)]
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "XDG_DATA_HOME": ""}
    environment = {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}
    ended = subprocess.run(
        [sys.executable, "-c", "from zerotune.flows.cli import main; main()", *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "cannot be written" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "zerotune-studies").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this host has no /proc, which lets nobody make a folder")
def test_a_home_that_refuses_what_its_permissions_allow_is_named_before_there_is_a_study(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/zerotune-home")
    with pytest.raises(InputError, match=r"/proc: it cannot be written"):
        require_data_folder("prefect")


def test_a_home_that_nobody_knows_of_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", _nobody)
    with pytest.raises(InputError, match="HOME: there is no home folder"):
        made_in_data_folder("prefect")
    (check,) = check_write_access({DATA: Path("~/.local/share/zerotune")})
    assert (check.verdict.value, "Set HOME" in str(check.remedy)) == ("fail", True)


def _nobody(uid: int) -> None:
    raise KeyError(uid)


_NO_THREADS = """
import sys, threading
from zerotune.flows.cli import main

def start(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = start
sys.argv = ["zerotune", "show"]
main()
"""


def test_a_limit_on_processes_is_told_in_a_sentence(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _NO_THREADS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "ulimit -u" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_what_an_error_came_of_counts_and_others_do_not() -> None:
    outer = ValueError("of a library")
    outer.__cause__ = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    assert is_out_of_processes(outer)
    assert not is_out_of_processes(RuntimeError("of the program's"))
