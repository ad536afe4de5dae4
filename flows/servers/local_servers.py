"""The processes of `zerotune up`: a Prefect server, the MLflow UI and a worker. Each ends with its parent."""

import os
import sys
from pathlib import Path

from flows.servers.prefect_server import migrate_own_database, own_environment, own_home, own_service, past_proxies
from flows.servers.service import LOOPBACK, Service, migrate
from trial_lib.tracking.runs import schema_lock
from trial_lib.tracking.tracking_uri import artifact_location, sqlite_file

POOL = "zerotune"
HEARTBEAT_S = 30


def prefect_service(port: int, logs: Path) -> Service:
    """Returns the Prefect server with its UI and all its services. Migrates its database first.

    Raises:
        ServerError: the database could not be migrated.
    """
    migrate_own_database()
    settings = {
        "PREFECT_SERVER_API_HOST": LOOPBACK,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_UI_API_URL": f"http://{LOOPBACK}:{port}/api",
    }
    service = own_service(port, logs / "prefect.log", settings)
    # It names the user's server, if there is one.
    service.environment.pop("PREFECT_API_URL", None)
    return service


def mlflow_service(store: str, port: int, logs: Path, work_dir: Path) -> Service | None:
    """Returns the MLflow UI over a store. Returns None if the store is an MLflow server itself.

    A SQLite store is created, or migrated to this MLflow's schema. Its artifacts are stored beside it. Those of any
    other store are stored in the work folder.

    Raises:
        ServerError: the store could not be migrated.
    """
    files = artifact_location(store, work_dir)
    if files is None:
        return None
    environment = {
        **os.environ,
        # A database's URI may contain a password, and every user can read a command line.
        "MLFLOW_BACKEND_STORE_URI": store,
        "MLFLOW_TRACKING_URI": store,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    # ZeroTune does not migrate a team's database.
    if sqlite_file(store) is not None:
        with schema_lock(store):
            command = [sys.executable, "-m", "mlflow", "db", "upgrade", store]
            what = f"MLflow could not migrate its store {store}"
            migrate(what, command, environment, folder=own_home(), log=logs / "mlflow-migration.log")
    return Service(
        "The MLflow UI",
        [
            *(sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"),
            # A study may write to the store directly. It can then add artifacts to the same experiment.
            *("--no-serve-artifacts", "--default-artifact-root", files),
        ],
        environment,
        logs / "mlflow.log",
        f"http://{LOOPBACK}:{port}/health",
    )


def worker_service(api_url: str, tracking_uri: str, logs: Path) -> Service:
    """Returns the worker of the process pool. Its runs record to the tracking URI."""
    return Service(
        "The worker",
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", "zerotune-up"],
        {
            **own_environment(own_home()),
            "PREFECT_API_URL": api_url,
            "MLFLOW_TRACKING_URI": tracking_uri,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            **past_proxies(),
            # A run starts within a second of its creation, and a killed run is noticed soon.
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_HEARTBEAT_SECONDS": str(HEARTBEAT_S),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        },
        logs / "worker.log",
    )
