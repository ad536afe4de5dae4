"""MLflow goes away during a study: the study goes on at its speed, and everything arrives afterwards, once."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from server_fixtures import Server, assert_whole_and_once, mlflow_server, runs_by_trial
from study_fixtures import Study, Zerotune

from zerotune.flows.prefect_server import PrefectServer

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(400)]

# In operation it is minutes. The pauses between the attempts double from one second to thirty, whatever the time.
AWAY_S = 20
SEARCH = ("binary", "-mt", "14", "-z", "1", "2", "3", "-mct", "1")


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[Server]:
    running = mlflow_server(tmp_path / "mlflow", f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    try:
        yield running.wait_until_ready()
    finally:
        running.kill()


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    # A trial takes some two seconds, whatever the machine.
    program = "--largest_micro_batch 300 --num_steps 100 --step_seconds 0.2"
    folder = tmp_path / "work"
    folder.mkdir()
    return Zerotune(folder, home, program=program)


def ended(zerotune: Zerotune) -> int:
    return len(list(zerotune.folder.glob("zerotune-studies/*/trials/*/result.json")))


def seconds_between_ends(study: Study) -> list[float]:
    times = sorted(study.result_times().values())
    return [(after - before) / 1e9 for before, after in pairwise(times)]


def test_mlflow_comes_back_during_the_study_and_has_everything_once(
    zerotune: Zerotune, mlflow: Server, server: PrefectServer
) -> None:
    command = zerotune.start(*SEARCH, MLFLOW_TRACKING_URI=mlflow.url, PREFECT_API_URL=server.api_url)
    command.wait_until(lambda: ended(zerotune) >= 2, "two trials")
    command.wait_until(lambda: runs_exist(mlflow, "tiny"), "runs in MLflow")
    mlflow.kill()
    killed_at, before = time.monotonic(), ended(zerotune)
    command.wait_until(lambda: time.monotonic() - killed_at > AWAY_S, "the end of its absence")
    while_away = ended(zerotune) - before
    mlflow.start()
    finished = command.end(timeout=200)
    assert finished.returncode == 0, finished.stderr
    assert "Some records have not reached MLflow" not in finished.stderr
    study = zerotune.study
    assert while_away >= 4
    # At its speed: no trial waited for MLflow, whose requests time out after ten seconds.
    assert max(seconds_between_ends(study)[2 : before + while_away]) < 8
    parent = assert_whole_and_once(mlflow.url, "tiny", study.results)
    assert parent.info.status == "FINISHED"


def runs_exist(mlflow: Server, name: str) -> bool:
    try:
        return bool(runs_by_trial(mlflow.url, name)[1])
    except AssertionError:
        return False


def test_mlflow_comes_back_after_the_study_and_sync_sends_everything_once(
    zerotune: Zerotune, mlflow: Server, server: PrefectServer
) -> None:
    named = {"MLFLOW_TRACKING_URI": mlflow.url, "PREFECT_API_URL": server.api_url}
    command = zerotune.start("binary", "-mt", "4", "-z", "1", "-mct", "1", **named)
    command.wait_until(lambda: ended(zerotune) >= 2, "two trials")
    mlflow.kill()
    finished = command.end(timeout=200)
    assert finished.returncode == 0, finished.stderr
    study = zerotune.study
    assert f"zerotune sync {study.paths.root}" in finished.stderr
    assert study.record["status"] == "completed"

    away = zerotune.run("sync", study.paths.root, **named)
    assert away.returncode == 1
    assert "Nothing is lost" in away.stderr
    mlflow.start()
    mlflow.wait_until_ready()
    for _ in range(2):
        sent = zerotune.run("sync", study.paths.root, **named)
        assert sent.returncode == 0, sent.stderr
        parent = assert_whole_and_once(mlflow.url, "tiny", study.results)
        assert parent.info.status == "FINISHED"
