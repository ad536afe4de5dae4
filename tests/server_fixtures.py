"""Servers as a team runs them, in processes of their own that a test may kill and start again: MLflow, Prefect."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

_READY_S = 120
_NOBODY = 65534
_FOREIGN = ("PREFECT_", "MLFLOW_")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Server:
    """A server on loopback; it comes up in the background.

    Attributes:
        url: of the server.
    """

    def __init__(self, command: list[str], health: str, folder: Path, port: int, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._folder, self._health = command, folder, health
        own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self._environment = {**own, **environment}
        self.start()

    def start(self) -> None:
        """Starts it, at its old address if it ran before."""
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_ready(self) -> "Server":
        """Waits until it answers."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (self._folder / "server.log").read_text()[-2000:]
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.url}{self._health}", timeout=1)
                return self
            time.sleep(0.1)
        raise AssertionError((self._folder / "server.log").read_text()[-2000:])

    @property
    def group(self) -> int:
        """The process group of it and its workers."""
        return self._process.pid

    def kill(self) -> None:
        """Kills it with all its workers, in the middle of whatever they do."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def mlflow_server(folder: Path, backend_store_uri: str) -> Server:
    """Returns an MLflow server that serves its artifacts from `folder`."""
    port = free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--workers": "1",
        "--backend-store-uri": backend_store_uri,
        "--artifacts-destination": str(folder / "artifacts"),
    }
    words = [word for option in options.items() for word in option]
    return Server(
        [sys.executable, "-m", "mlflow", "server", "--serve-artifacts", *words],
        "/health",
        folder,
        port,
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
        MLFLOW_DISABLE_TELEMETRY="true",
    )


def prefect_server(folder: Path, database_url: str) -> Server:
    """Returns a Prefect server that migrates its database and then answers."""
    port = free_port()
    return Server(
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        "/api/health",
        folder,
        port,
        PREFECT_HOME=str(folder),
        PREFECT_SERVER_DATABASE_CONNECTION_URL=database_url,
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DO_NOT_TRACK="1",
    )


def as_another_user(work: Callable[[], Any]) -> Any:
    """Returns what a function returns in a process of another Unix user, as JSON. Skips the test without root."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            os.write(theirs, json.dumps(work()).encode())
        except BaseException as error:  # noqa: BLE001 - the test's process shows it
            os.write(theirs, json.dumps(repr(error)).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return json.loads(said)


def runs_by_trial(url: str, experiment_name: str) -> tuple[list[Run], dict[str, list[Run]]]:
    """Returns an experiment's parent runs, and its child runs by their trial."""
    client = MlflowClient(tracking_uri=url)
    experiment = client.get_experiment_by_name(experiment_name)
    assert experiment is not None
    parents: list[Run] = []
    children: dict[str, list[Run]] = {}
    for run in client.search_runs([experiment.experiment_id], max_results=1000):
        if "mlflow.parentRunId" in run.data.tags:
            children.setdefault(run.data.tags["trial"], []).append(run)
        else:
            parents.append(run)
    return parents, children


def assert_whole_and_once(url: str, experiment_name: str, results: dict[int, Any]) -> Run:
    """Asserts that MLflow has all of a study's trials, each once, with values and files; returns the study's run."""
    client = MlflowClient(tracking_uri=url)
    (parent,), children = runs_by_trial(url, experiment_name)
    assert {trial: len(runs) for trial, runs in children.items()} == {f"{number:04d}": 1 for number in results}
    for number, result in results.items():
        (child,) = children[f"{number:04d}"]
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.data.tags["outcome"] == result.outcome.value
        assert "sent" in child.data.tags
        assert result.metrics.items() <= child.data.metrics.items()
        steps = client.get_metric_history(child.info.run_id, "step_time") if result.step_times else []
        assert [point.value for point in sorted(steps, key=lambda point: point.step)] == result.step_times
        files = {file.path for file in client.list_artifacts(child.info.run_id)}
        assert {"ds_config.json", "result.json"} <= files
    return parent
