"""A Prefect server stops answering, as SIGSTOP makes it: it takes connections, and is silent."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from study_fixtures import BIN, Zerotune, words_of
from test_study_kills import users_server  # noqa: F401
from worker_fixtures import is_training

QUICK = "--largest_micro_batch 40 --num_steps 20 --step_seconds 0.05"
SEARCH = ("binary", "-mt", "4", "-z", "1", "-mct", "1")
# Enough trials to find a size that runs.
ENDING = ("binary", "-mt", "8", "-z", "1", "-mct", "1")
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
