"""An MLflow server stops answering, as SIGSTOP makes it: it takes connections, and is silent. A study loses nothing."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_fixtures import Server, assert_whole_and_once, mlflow_server
from study_fixtures import Zerotune
from test_tracking_away import runs_exist
from worker_fixtures import is_training

pytestmark = pytest.mark.alone

QUICK = "--largest_micro_batch 40 --num_steps 20 --step_seconds 0.05"
# Enough trials to find a size that runs.
SEARCH = ("binary", "-mt", "8", "-z", "1", "-mct", "1")
# The first size that is tried runs.
FITS, FEW = "--largest_micro_batch 300 --num_steps 20", ("binary", "-mt", "3", "-z", "1", "-mct", "1")
# What a study waits for MLflow at its end, and what a busy machine takes for the rest.
CLOSE_S, REST_S = 30.0, 15.0


def checked(zerotune: Zerotune, returncode: int, said: str) -> None:
    """Checks that a study has its answer, has said what MLflow lacks, and did not wait for long."""
    assert returncode == 0, said
    study = zerotune.study
    assert study.record["status"] == "completed"
    assert study.paths.report.exists()
    waited, about_it = [line for line in said.splitlines() if "MLflow" in line]
    assert waited.startswith("Waiting for MLflow, for ")
    assert about_it.startswith("Some records have not reached MLflow (")
    assert f"Send it later: zerotune sync {study.paths.root}" in said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_server_that_hangs_from_the_beginning_holds_nothing_up_and_the_study_says_how_to_send_it(
    tmp_path: Path, home: Path
) -> None:
    zerotune = Zerotune(tmp_path, home, program=FITS)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ended = zerotune.run(*FEW, MLFLOW_TRACKING_URI=uri)
        took = time.time() - zerotune.study.paths.best_command.stat().st_mtime
    checked(zerotune, ended.returncode, ended.stderr)
    assert took < CLOSE_S + REST_S


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[Server]:
    running = mlflow_server(tmp_path / "mlflow", f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    try:
        yield running.wait_until_ready()
    finally:
        running.kill()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", ["the start", "the middle", "the end"])
def test_a_server_that_hangs_gets_everything_once_when_it_is_back(
    tmp_path: Path, home: Path, mlflow: Server, moment: str
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    zerotune = Zerotune(folder, home, program=QUICK)
    command = zerotune.start(*SEARCH, MLFLOW_TRACKING_URI=mlflow.url)
    if moment == "the middle":
        command.wait_until(lambda: is_training(zerotune, 3), "trial 3", 120)
        command.wait_until(lambda: runs_exist(mlflow, "tiny"), "runs in MLflow")
    if moment == "the end":
        command.wait_until(lambda: list(folder.glob("zerotune-studies/*/best_command.txt")), "the answer", 120)
    os.killpg(mlflow.group, signal.SIGSTOP)
    ended = command.end(timeout=300)
    study = zerotune.study
    took = time.time() - study.paths.best_command.stat().st_mtime
    checked(zerotune, ended.returncode, ended.stderr)
    assert took < CLOSE_S + REST_S
    os.killpg(mlflow.group, signal.SIGCONT)
    sent = zerotune.run("sync", study.paths.root, MLFLOW_TRACKING_URI=mlflow.url)
    assert sent.returncode == 0, sent.stderr
    assert assert_whole_and_once(mlflow.url, "tiny", study.results).info.status == "FINISHED"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_server_that_hangs_for_a_while_in_the_middle_has_everything_at_the_end(
    tmp_path: Path, home: Path, mlflow: Server
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    zerotune = Zerotune(folder, home, program="--largest_micro_batch 300 --num_steps 100 --step_seconds 0.2")
    command = zerotune.start(*SEARCH, MLFLOW_TRACKING_URI=mlflow.url)
    command.wait_until(lambda: is_training(zerotune, 3), "trial 3", 120)
    os.killpg(mlflow.group, signal.SIGSTOP)
    until = time.monotonic() + 15
    command.wait_until(lambda: time.monotonic() > until, "the end of its silence")
    os.killpg(mlflow.group, signal.SIGCONT)
    ended = command.end(timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "Some records have not reached MLflow" not in ended.stderr
    assert assert_whole_and_once(mlflow.url, "tiny", zerotune.study.results).info.status == "FINISHED"
