"""A Prefect server stops answering, as SIGSTOP makes it: it takes connections, and is silent."""

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from study_fixtures import BIN, Zerotune, query, words_of
from test_study_kills import users_server  # noqa: F401
from worker_fixtures import is_training

pytestmark = pytest.mark.alone

QUICK = "--largest_micro_batch 40 --num_steps 20 --step_seconds 0.05"
SEARCH = ("binary", "-mt", "4", "-z", "1", "-mct", "1")
# Trials of some seconds, after which the server is back before the end.
SLOW = "--largest_micro_batch 300 --num_steps 100 --step_seconds 0.05"
# Enough trials to find a size that runs.
ENDING = ("binary", "-mt", "8", "-z", "1", "-mct", "1")
# The first size that is tried runs.
FITS, FEW = "--largest_micro_batch 300 --num_steps 20", ("binary", "-mt", "3", "-z", "1", "-mct", "1")
# What `docs/operations.md` promises, and what a busy machine takes for the rest.
END_S, REST_S = 30.0, 10.0


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_server_that_hangs_holds_the_end_up_for_no_longer_than_promised_and_is_told_of_in_one_sentence(
    tmp_path: Path,
    home: Path,
    users_server: tuple[subprocess.Popen[bytes], str],  # noqa: F811
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    zerotune = Zerotune(folder, home, program=QUICK)
    process, url = users_server
    command = zerotune.start(*SEARCH, PREFECT_API_URL=url)
    command.wait_until(lambda: is_training(zerotune, 2), "trial 2", 120)
    os.kill(process.pid, signal.SIGSTOP)
    ended = command.end(timeout=300)
    took = time.time() - zerotune.study.paths.best_command.stat().st_mtime
    assert ended.returncode == 0, ended.stderr
    assert took < END_S + REST_S
    about_it = [line for line in ended.stderr.splitlines() if "refect" in line]
    assert len(about_it) == 1, ended.stderr
    assert "does not answer" in about_it[0]


@pytest.mark.long
def test_a_server_that_hangs_from_the_beginning_is_told_of_in_a_sentence_and_no_trial_runs(
    tmp_path: Path, home: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    zerotune = Zerotune(folder, home, program=QUICK)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        began = time.monotonic()
        ended = zerotune.run(*SEARCH, PREFECT_API_URL=url)
    assert time.monotonic() - began < END_S + REST_S
    assert ended.returncode == 1
    assert [line for line in ended.stderr.splitlines() if "refect" in line] == [ended.stderr.splitlines()[-1]]
    assert f"the Prefect server {url}/ does not answer" in ended.stderr
    assert not zerotune.study.results


class _Healthy(http.server.BaseHTTPRequestHandler):
    """Answers the health check, and nothing after it."""

    def do_GET(self) -> None:
        if not self.path.endswith("/health"):
            time.sleep(600)
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"true")

    do_POST = do_GET  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_study_goes_on_without_a_server_that_hangs_right_after_its_health_check(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home, program=FITS)
    silent = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Healthy)
    silent.daemon_threads = True
    threading.Thread(target=silent.serve_forever, daemon=True).start()
    # What a user may set. It is only for the first request, which otherwise waits longer.
    patience = {"PREFECT_API_REQUEST_TIMEOUT": "1", "PREFECT_CLIENT_MAX_RETRIES": "0"}
    url = f"http://127.0.0.1:{silent.server_address[1]}/api"
    ended = zerotune.run(*FEW, PREFECT_API_URL=url, **patience)
    silent.socket.close()
    assert ended.returncode == 0, ended.stderr
    assert zerotune.study.record["status"] == "completed"
    (about_it,) = [line for line in ended.stderr.splitlines() if "refect" in line]
    assert "Prefect's server did not take this run" in about_it
    assert "its folder has all records" in about_it
    assert "Traceback" not in ended.stderr


@contextlib.contextmanager
def relayed(port: int, healthy: Callable[[], None]) -> Iterator[int]:
    """Relays connections to a port, and calls `healthy` once a health check has been answered. Yields its own port."""

    def pass_on(source: socket.socket, target: socket.socket, after: threading.Event, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if asks and b"/health" in data:
                    after.set()
                target.sendall(data)
                if data.endswith(b"true") and after.is_set() and not (asks or told.is_set()):
                    told.set()
                    healthy()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = listening.accept()
                theirs, after = socket.create_connection(("127.0.0.1", port)), threading.Event()
                for way in ((ours, theirs, after, True), (theirs, ours, after, False)):
                    threading.Thread(target=pass_on, args=way, daemon=True).start()

    told = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_user_s_server_that_hangs_before_its_first_request_gets_the_run_when_it_is_back(
    tmp_path: Path,
    home: Path,
    users_server: tuple[subprocess.Popen[bytes], str],  # noqa: F811
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    zerotune = Zerotune(folder, home, program=SLOW)
    process, url = users_server
    stopped_at = 0.0

    def stop() -> None:
        nonlocal stopped_at
        os.kill(process.pid, signal.SIGSTOP)
        stopped_at = time.monotonic()

    with relayed(urlsplit(url).port or 0, stop) as port:
        command = zerotune.start(*ENDING, PREFECT_API_URL=f"http://127.0.0.1:{port}/api")
        command.wait_until(lambda: "did not take this run" in command.said, "the word", 120)
        assert 0 < time.monotonic() - stopped_at < 75
        os.kill(process.pid, signal.SIGCONT)
        ended = command.end(timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert len([line for line in ended.stderr.splitlines() if "refect" in line]) == 1, ended.stderr
    assert recorded_states(zerotune) == {"COMPLETED"}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_user_s_server_that_hangs_for_a_while_has_the_end_of_the_run(
    tmp_path: Path,
    home: Path,
    users_server: tuple[subprocess.Popen[bytes], str],  # noqa: F811
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    zerotune = Zerotune(folder, home, program=SLOW)
    process, url = users_server
    command = zerotune.start(*ENDING, PREFECT_API_URL=url)
    command.wait_until(lambda: is_training(zerotune, 2), "trial 2", 120)
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + 15
    command.wait_until(lambda: time.monotonic() > until, "the end of its silence")
    os.kill(process.pid, signal.SIGCONT)
    ended = command.end(timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert len([line for line in ended.stderr.splitlines() if "refect" in line]) <= 1, ended.stderr
    assert recorded_states(zerotune) == {"COMPLETED"}


def recorded_states(zerotune: Zerotune) -> set[str]:
    """Returns the states of the task runs that Prefect has of a study, whose run has completed."""
    name = zerotune.study.record["study_id"]
    runs = query(zerotune.prefect_database, "select id from flow_run where name = ? and state_type = 'COMPLETED'", name)
    ((run,),) = runs
    tasks = query(zerotune.prefect_database, "select state_type from task_run where flow_run_id = ?", run)
    return {state for (state,) in tasks}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_own_server_that_hangs_before_its_first_request_is_started_again(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    zerotune = Zerotune(folder, home, program=QUICK)
    command = zerotune.start(*ENDING)

    def is_ready() -> bool:
        logs = list(folder.glob("zerotune-studies/*/study.log"))
        return bool(logs) and "the Prefect server is ready" in logs[0].read_text()

    command.wait_until(is_ready, "the server", 120)
    servers = [each for each in command.look() if "own_server.py" in " ".join(words_of(each))]
    assert servers
    for server in servers:
        os.kill(server.pid, signal.SIGSTOP)
    ended = command.end(timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert zerotune.study.record["status"] == "completed"
    assert not command.left_over(5)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_study_goes_on_without_its_terminal(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    zerotune = Zerotune(folder, home, program=QUICK)
    ours, theirs = os.openpty()
    words = [str(BIN / "zerotune"), ENDING[0], str(zerotune.config), str(zerotune.model), *ENDING[1:]]
    command = subprocess.Popen(
        words,
        cwd=folder,
        env=zerotune.environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    deadline = time.monotonic() + 120
    while not list(folder.glob("zerotune-studies/*/trials/*/rank0.log")):
        # A terminal that nobody reads would hold the command up.
        os.set_blocking(ours, False)
        with contextlib.suppress(OSError):
            os.read(ours, 65536)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.close(ours)
    assert command.wait(200) == 0
    assert zerotune.study.record["status"] == "completed"
    assert zerotune.study.paths.report.exists()
