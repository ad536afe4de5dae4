"""A server on a leash: whichever of its processes is killed, none of them is left."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from study_fixtures import is_alive

from trial_lib.launch.processes.keeper import Leashed

# A server with a worker of its own in another session, as MLflow and uvicorn have them.
SERVER = (
    "import subprocess, time\n"
    "worker = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "print(worker.pid, flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def leashed(tmp_path: Path) -> Leashed:

    return Leashed([sys.executable, "-c", SERVER], dict(os.environ), tmp_path / "server.log")


def processes(leashed: Leashed, tmp_path: Path) -> dict[str, psutil.Process]:
    """Waits for the server's worker, and returns all processes by what they are."""
    log, deadline = tmp_path / "server.log", time.monotonic() + 20
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker = psutil.Process(int(log.read_text()))
    server = worker.parent()
    holder = server.parent()
    return {"worker": worker, "server": server, "holder": holder, "keeper": holder.parent()}


def assert_gone(leashed: Leashed, found: dict[str, psutil.Process], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(is_alive(process) for process in found.values()) or leashed.is_running:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.mark.parametrize("victim", ["server", "holder", "keeper"])
def test_whichever_is_killed_the_others_end(leashed: Leashed, tmp_path: Path, victim: str) -> None:
    found = processes(leashed, tmp_path)
    assert found["keeper"].ppid() == os.getpid()
    found[victim].kill()
    assert_gone(leashed, found, 2)
    leashed.close()


def test_closing_returns_when_all_are_gone(leashed: Leashed, tmp_path: Path) -> None:
    found = processes(leashed, tmp_path)
    leashed.close()
    assert_gone(leashed, found, 0)


@pytest.mark.long
@pytest.mark.parametrize("stopped", [("server", "holder"), ("server", "holder", "keeper")])
def test_closing_ends_those_that_somebody_has_stopped(
    leashed: Leashed, tmp_path: Path, stopped: tuple[str, ...]
) -> None:
    found = processes(leashed, tmp_path)
    for name in stopped:
        os.kill(found[name].pid, signal.SIGSTOP)
    began = time.monotonic()
    leashed.close()
    assert time.monotonic() - began < 15
    assert_gone(leashed, found, 1)
