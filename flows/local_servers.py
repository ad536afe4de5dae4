"""The processes of `zerotune up`, each on a leash: a Prefect server, the MLflow UI, a worker."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from flows.prefect_server import ServerError, migrate_own_database, own_environment, own_home, past_proxies
from trial_lib.launch.leash import Leashed
from trial_lib.tracking.runs import schema_lock
from trial_lib.tracking.tracking_uri import artifact_location, is_server, sqlite_file

POOL = "zerotune"
HEARTBEAT_S = 30
_READY_S = 180.0
_POLL_S = 0.1
_HOST = "127.0.0.1"


@dataclass
class Service:
    """A process that runs for as long as `zerotune up` does.

    Attributes:
        name: for people.
        command: without a shell.
        environment: all of its environment variables.
        log: file with what it says since it was started.
        health: the URL that answers once it is ready; None for one that serves nothing.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    health: str | None = None
    _process: Leashed | None = field(default=None, init=False)

    def start(self) -> None:
        """Starts it; its log begins anew, and the one before is kept."""
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".before.log"))
        self._process = Leashed(self.command, self.environment, self.log)

    @property
    def is_running(self) -> bool:
        """Whether its process is alive."""
        return self._process is not None and self._process.is_running

    def wait_until_ready(self) -> None:
        """Waits until it answers.

        Raises:
            ServerError: it ended, or did not answer in three minutes.
        """
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and self.is_running:
            if self._answers():
                return
            time.sleep(_POLL_S)
        raise ServerError(f"{self.name} did not come up; its log is {self.log}.")

    def _answers(self) -> bool:
        if self.health is None:
            return True
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError), direct.open(self.health, timeout=2):
            return True
        return False

    def close(self) -> None:
        """Ends it, with all that it has started; returns when that is gone."""
        if self._process is not None:
            self._process.close()


def prefect_service(port: int, logs: Path) -> Service:
    """Returns the Prefect server, with all its services and its UI, its database migrated.

    Raises:
        ServerError: the database could not be migrated.
    """
    migrate_own_database()
    environment = {
        **own_environment(own_home()),
        "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",
        "PREFECT_SERVER_API_HOST": _HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_UI_API_URL": f"http://{_HOST}:{port}/api",
    }
    # The user's own server is not this one's.
    environment.pop("PREFECT_API_URL", None)
    return Service(
        "The Prefect server",
        [
            *(sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"),
            *("--host", _HOST, "--port", str(port), "--timeout-keep-alive", "5", "--log-level", "warning"),
        ],
        environment,
        logs / "prefect.log",
        f"http://{_HOST}:{port}/api/health",
    )


def mlflow_service(store: str, port: int, logs: Path) -> Service | None:
    """Returns the MLflow UI over a store, whose tables are made or migrated; None where the store is a server itself.

    Raises:
        ServerError: the store's tables could not be migrated.
    """
    if is_server(store):
        return None
    environment = {
        **os.environ,
        # A database's URI may hold a password: not on a command line, which everybody sees.
        "MLFLOW_BACKEND_STORE_URI": store,
        "MLFLOW_TRACKING_URI": store,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    # A database of a team's is theirs to migrate.
    if sqlite_file(store) is not None:
        with schema_lock(store):
            migration = subprocess.run(
                [sys.executable, "-m", "mlflow", "db", "upgrade", store],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        if migration.returncode != 0:
            said = migration.stdout.strip().splitlines() or ["it said nothing"]
            raise ServerError(f"MLflow could not bring its store {store} to this version's schema ({said[-1]}).")
    artifacts = artifact_location(store)
    # Files, and not through the server: a study that records to the store itself can then add to the same experiment.
    artifacts_root = () if artifacts is None else ("--no-serve-artifacts", "--default-artifact-root", artifacts)
    return Service(
        "The MLflow UI",
        [
            *(sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1"),
            *artifacts_root,
        ],
        environment,
        logs / "mlflow.log",
        f"http://{_HOST}:{port}/health",
    )


def worker_service(api_url: str, tracking_uri: str, logs: Path) -> Service:
    """Returns the worker of the process pool; what it runs records to the tracking URI."""
    return Service(
        "The worker",
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", "zerotune-up"],
        {
            **own_environment(own_home()),
            "PREFECT_API_URL": api_url,
            "MLFLOW_TRACKING_URI": tracking_uri,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            **past_proxies(),
            # A run begins within a second of its creation, and one that is killed is missed soon.
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_HEARTBEAT_SECONDS": str(HEARTBEAT_S),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        },
        logs / "worker.log",
    )
