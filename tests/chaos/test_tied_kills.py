"""A tied server: whichever of its processes is killed, none of them is left."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from study_fixtures import is_alive

from zerotune.trial_lib.launch.processes.watchdog import TiedProcess

pytestmark = pytest.mark.alone

# A server with a worker of its own in another session, as MLflow and uvicorn have them.
SERVER = (
    "import subprocess, time\n"
    "worker = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "print(worker.pid, flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def tied(tmp_path: Path) -> TiedProcess:

    return TiedProcess([sys.executable, "-c", SERVER], dict(os.environ), tmp_path / "server.log")


def processes(tied: TiedProcess, tmp_path: Path) -> dict[str, psutil.Process]:
    """Waits for the server's worker, and returns all processes by what they are."""
    log, deadline = tmp_path / "server.log", time.monotonic() + 20
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker = psutil.Process(int(log.read_text()))
    server = worker.parent()
    holder = server.parent()
    return {"worker": worker, "server": server, "holder": holder, "watchdog": holder.parent()}


def assert_gone(tied: TiedProcess, found: dict[str, psutil.Process], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(is_alive(process) for process in found.values()) or tied.is_running:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.mark.parametrize("victim", ["server", "holder", "watchdog"])
def test_whichever_is_killed_the_others_end(tied: TiedProcess, tmp_path: Path, victim: str) -> None:
    found = processes(tied, tmp_path)
    assert found["watchdog"].ppid() == os.getpid()
    found[victim].kill()
    assert_gone(tied, found, 2)
    tied.close()


def test_closing_returns_when_all_are_gone(tied: TiedProcess, tmp_path: Path) -> None:
    found = processes(tied, tmp_path)
    tied.close()
    assert_gone(tied, found, 0)


@pytest.mark.long
@pytest.mark.parametrize("stopped", [("server", "holder"), ("server", "holder", "watchdog")])
def test_closing_ends_those_that_somebody_has_stopped(
    tied: TiedProcess, tmp_path: Path, stopped: tuple[str, ...]
) -> None:
    found = processes(tied, tmp_path)
    for name in stopped:
        os.kill(found[name].pid, signal.SIGSTOP)
    began = time.monotonic()
    tied.close()
    assert time.monotonic() - began < 15
    assert_gone(tied, found, 1)
