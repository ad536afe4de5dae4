"""Everything around a study is killed in turn: it comes to its end, with every trial run once and nothing left over."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient
from server_fixtures import free_port
from study_fixtures import Running, Study, Zerotune, is_alive, query, words_of
from worker_fixtures import alive, is_training, pids_of, wait_until, with_sessions_of_its_own

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.study.history import PROFILE_NUMBER, SUBMITTED_NUMBER
from zerotune.trial_lib.tracking.sync import StudySync

pytestmark = [pytest.mark.alone, pytest.mark.long]

# A trial takes seconds: long enough to be caught in the middle of it.
SLOW = "--largest_micro_batch 300 --num_steps 100 --step_seconds 0.05"
FITS = 3  # the one before it is too large, and ends by itself
SEARCH = ("binary", "-mt", "5", "-z", "1", "-mct", "1")


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    zerotune = Zerotune(tmp_path, home, program=SLOW)
    with_sessions_of_its_own(zerotune)
    return zerotune


@pytest.fixture
def command(zerotune: Zerotune, server: PrefectServer) -> Running:
    """A study against a Prefect server that stays, in a trial whose size fits."""
    command = zerotune.start(*SEARCH, PREFECT_API_URL=server.api_url)
    command.wait_until(lambda: is_training(zerotune, FITS), "a trial that fits", 120)
    return command


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
        return True
    return False


def program_of(study: Study, number: int) -> psutil.Process:
    """Returns the rank of a running trial."""
    words = next(line for line in study.paths.trial(number).log(0).read_text().splitlines() if " cores " in line)
    return psutil.Process(int(words.split()[1]))


def end(command: Running, zerotune: Zerotune, code: int = 0) -> Study:
    """Waits for the end of a study that has lost something, and checks that nothing of it is left or was lost."""
    finished = zerotune.study.result_times()
    ended = command.follow(timeout=200)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert command.left_over(2) == []
    study = zerotune.study
    assert not alive(pids_of(study))
    times = study.result_times()
    assert {number: times[number] for number in finished} == finished
    told = [event.number for event in study.told]
    assert sorted(told) == sorted({asked.number for asked in study.asked})
    assert len(told) == len(set(told))
    assert study.record["status"] == "completed"
    return study


def test_a_killed_rank_costs_its_trial_which_says_so(command: Running, zerotune: Zerotune) -> None:
    program_of(zerotune.study, FITS).kill()
    result = end(command, zerotune).results[FITS]
    assert result.outcome is Outcome.CRASHED
    assert "Rank 0 was killed by SIGKILL" in result.reason


@pytest.mark.parametrize("victim", ["server", "watchdog"])
def test_a_killed_fork_server_costs_no_trial(command: Running, zerotune: Zerotune, victim: str) -> None:
    rank = program_of(zerotune.study, FITS)
    guard = rank.parent()
    server = guard.parent().parent()
    watchdog = server.parent()
    assert watchdog.ppid() == command.process.pid
    (server if victim == "server" else watchdog).kill()
    study = end(command, zerotune)
    assert {result.outcome for result in study.results.values()} <= {Outcome.COMPLETED, Outcome.OUT_OF_MEMORY}


def test_a_killed_guard_costs_its_trial_which_says_so(command: Running, zerotune: Zerotune) -> None:
    pids = pids_of(zerotune.study)
    program_of(zerotune.study, FITS).parent().kill()
    wait_until(lambda: not alive(pids), "end of the ranks", 2)
    result = end(command, zerotune).results[FITS]
    assert result.outcome is Outcome.CRASHED
    assert "guard" in result.reason


@pytest.mark.parametrize("number", [PROFILE_NUMBER, SUBMITTED_NUMBER])
def test_a_trial_that_the_study_stands_on_is_run_again_when_it_is_killed_and_the_study_goes_on(
    zerotune: Zerotune, server: PrefectServer, number: int
) -> None:
    command = zerotune.start(*SEARCH, PREFECT_API_URL=server.api_url)
    command.wait_until(lambda: is_training(zerotune, number), f"trial {number}", 120)
    program_of(zerotune.study, number).kill()
    assert end(command, zerotune).results[number].outcome is Outcome.COMPLETED


def test_the_command_s_own_prefect_server_is_started_again_and_has_the_whole_history(zerotune: Zerotune) -> None:
    # What a user calls modules in the folder where the command runs is no matter of the server's.
    for name in ("flows", "prefect", "uvicorn"):
        (zerotune.folder / f"{name}.py").write_text("raise RuntimeError('of the user')\n")
    command = zerotune.start(*SEARCH)
    command.wait_until(lambda: is_training(zerotune, 2), "trial 2", 120)
    (server,) = [
        process
        for process in command.look()
        if is_alive(process) and "own_server.py" in " ".join(words_of(process)[1:2])
    ]
    server.kill()
    study = end(command, zerotune)
    (state,) = query(
        zerotune.prefect_database, "select state_type, id from flow_run where name = ?", study.paths.root.name
    )
    assert state[0] == "COMPLETED"
    runs = query(zerotune.prefect_database, "select name, state_type from task_run where flow_run_id = ?", state[1])
    numbers = {int(name.split("-")[1]) for name, _ in runs if name.startswith("trial-")}
    assert {kind for _, kind in runs} == {"COMPLETED"}
    assert numbers == set(study.results)


@pytest.fixture
def users_server(tmp_path: Path, home: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A Prefect server that nobody starts again, and its address."""
    data, port = home / "zerotune" / "prefect", free_port()
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path / "prefect-home"),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{data / 'prefect.db'}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    words = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--port", str(port)]
    with (tmp_path / "prefect.log").open("wb") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/api/health"), "Prefect server", 90)
        yield process, f"http://127.0.0.1:{port}/api"
    finally:
        process.kill()
        process.wait()


def test_a_study_goes_on_at_its_speed_when_the_prefect_server_dies_for_good(
    zerotune: Zerotune, users_server: tuple[subprocess.Popen[bytes], str]
) -> None:
    process, url = users_server
    command = zerotune.start(*SEARCH, PREFECT_API_URL=url)
    command.wait_until(lambda: is_training(zerotune, 2), "trial 2", 120)
    process.kill()
    process.wait()
    study = end(command, zerotune)
    after = [study.results[event.number] for event in study.told if event.number > 2]
    assert len(after) > 2
    ends = [result.started_at + sum(result.phases.values()) for result in after]
    pauses = [later.started_at - earlier for earlier, later in zip(ends, after[1:], strict=False)]
    # The first thing that Prefect is not told may cost some seconds, and none after it.
    assert sorted(pauses)[-2] < 2
    assert sum(pauses) < 10
    log = study.paths.log.read_text()
    assert log.count("Prefect's server does not answer") == 1
    assert "Prefect has not recorded the end" in log
    assert study.record["ended_at"] - ends[-1] < 10


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_study_is_recorded_once_whether_its_mlflow_server_comes_back_or_not(
    zerotune: Zerotune, server: PrefectServer, tmp_path: Path, comes_back: bool
) -> None:
    mlflow = MlflowServer(tmp_path / "mlflow")
    try:
        settings = {"PREFECT_API_URL": server.api_url, "MLFLOW_TRACKING_URI": mlflow.url}
        command = zerotune.start(*SEARCH, **settings)
        command.wait_until(lambda: is_training(zerotune, 2), "trial 2", 120)
        mlflow.kill()
        if comes_back:
            command.wait_until(lambda: is_training(zerotune, 3), "trial 3", 120)
            mlflow.start()
        study = end(command, zerotune)
        if not comes_back:
            assert "Some records have not reached MLflow" in command.said
            mlflow.start()
            StudySync(study.paths, mlflow.url).run()
        assert mlflow.trials_of(study) == sorted(study.results)
    finally:
        mlflow.kill()


class MlflowServer:
    """An MLflow server that records into a folder.

    Attributes:
        url: where it answers.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Starts it, and returns when it answers."""
        store = f"sqlite:///{self._folder}/mlflow.db"
        words = ["server", "--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        places = ["--backend-store-uri", store, "--artifacts-destination", str(self._folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *words, *places],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: answers(f"{self.url}/health"), "MLflow server", 90)

    def kill(self) -> None:
        """Kills it with its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        time.sleep(0.1)

    def trials_of(self, study: Study) -> list[int]:
        """Returns the numbers of the trials that it has under the study's one run, each as often as it has it."""
        client = MlflowClient(tracking_uri=self.url)
        experiment = client.get_experiment_by_name("tiny")
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id])
        (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
        assert parent.info.status == "FINISHED"
        children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
        assert len(children) == len(runs) - 1
        return sorted(int(run.data.tags["trial"]) for run in children)
