"""The processes of `zerotune up`: a Prefect server, the MLflow UI and a worker. Each ends with its parent."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from flows.servers.held_port import LOOPBACK, HeldPort
from flows.servers.owners_only import CREDENTIAL
from flows.servers.prefect_server import (
    client_environment,
    migrate_own_database,
    own_environment,
    own_home,
    own_service,
    server_command,
)
from flows.servers.service import Service, migrate
from trial_lib.tracking.runs import schema_lock
from trial_lib.tracking.tracking_uri import artifact_location, sqlite_file

POOL = "zerotune"
HEARTBEAT_S = 30


def prefect_service(port: HeldPort, credential: str, logs: Path) -> Service:
    """Returns the Prefect server with its UI and all its services. Migrates its database first.

    Raises:
        ServerError: the database could not be migrated.
    """
    migrate_own_database()
    settings = {"PREFECT_SERVER_API_HOST": LOOPBACK, "PREFECT_SERVER_API_PORT": str(port.number)}
    service = own_service(port, credential, logs / "prefect.log", settings)
    # It names the user's server, if there is one.
    service.environment.pop("PREFECT_API_URL", None)
    return service


def mlflow_service(store: str, port: HeldPort, credential: str, logs: Path, work_dir: Path) -> Service | None:
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
        # The user's settings for a server of their own are not for this one.
        **{name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_SERVER_")},
        # A database's URI may contain a password, and every user can read a command line.
        "MLFLOW_BACKEND_STORE_URI": store,
        "MLFLOW_TRACKING_URI": store,
        # A study may write to the store directly. It can then add artifacts to the same experiment.
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": files,
        CREDENTIAL: credential,
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
    return Service("The MLflow UI", server_command("mlflow", port), environment, logs / "mlflow.log", port)


def worker_service(api_url: str, credential: str, tracking: Mapping[str, str], logs: Path) -> Service:
    """Returns the worker of the process pool. Its runs record to MLflow as the variables of `tracking` say."""
    return Service(
        "The worker",
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", "zerotune-up"],
        {
            **own_environment(own_home()),
            **client_environment(api_url, credential),
            **tracking,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            # A run starts within a second of its creation, and a killed run is noticed soon.
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_HEARTBEAT_SECONDS": str(HEARTBEAT_S),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        },
        logs / "worker.log",
    )
