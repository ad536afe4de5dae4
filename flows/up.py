"""`zerotune up` and `zerotune down`: a Prefect server, the MLflow UI and a worker, on loopback."""

import contextlib
import importlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

from zerotune.flows.interrupts import interrupts
from zerotune.flows.own_server import CREDENTIAL, USER, drawn_credential
from zerotune.flows.prefect_server import (
    LOOPBACK,
    HeldPort,
    ServerError,
    Service,
    client_environment,
    hold,
    migrate,
    migrate_own_database,
    own_environment,
    own_home,
    own_service,
    record_servers,
    server_command,
    shell_file,
    stop,
    up_folder,
)
from zerotune.flows.terminal import say, say_link
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.tracking.runs import schema_lock
from zerotune.trial_lib.tracking.tracking_uri import (
    artifact_location,
    default_tracking_uri,
    sqlite_file,
    without_password,
)

POOL = "zerotune"  # the work pool
HEARTBEAT_S = 30


def prefect_service(port: HeldPort, credential: str, logs: Path) -> Service:
    """Returns the Prefect server with its UI and all its services. Migrates its database first.
    Raises ServerError: the database could not be migrated.
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
    other store are stored in the work folder. Raises ServerError: the store could not be migrated.
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


_WATCH_S = 0.5
_END_S = 70.0  # runs are cancelled first, and a training may save a checkpoint
_TOO_SHORT_S = 30.0  # a service that ends so soon after its start would end again


def up_command(prefect_port: int, mlflow_port: int) -> int:
    """Raises InputError if it runs already or a port is taken, ServerError if a service does not start."""
    work_dir = Path.cwd()
    store = default_tracking_uri(work_dir)
    with interrupts.opening(), contextlib.ExitStack() as held:
        held.enter_context(hold())
        ports = [
            held.enter_context(contextlib.closing(_held_port(prefect_port, "--prefect-port"))),
            held.enter_context(contextlib.closing(_held_port(mlflow_port, "--mlflow-port"))),
        ]
        to_close = held.pop_all()
    interrupts.resume_command = "zerotune up"
    # Python may search the working folder for modules. The user's may contain any names.
    os.chdir(own_home())
    with to_close, interrupts.noting(lambda: None, _END_S):
        try:
            with contextlib.ExitStack() as open_services:
                services = _start(work_dir, store, *ports, open_services)
                interrupts.is_heeded = True
                _watch(services)
        except (KeyboardInterrupt, Exception):
            if not interrupts.heard:
                raise
    if interrupts.is_heeded:
        say("Everything has stopped.")
    return 0


def down_command() -> int:
    say("Everything has stopped." if stop() else "zerotune up is not running.")
    return 0


def _start(
    work_dir: Path, store: str, prefect_port: HeldPort, mlflow_port: HeldPort, open_services: contextlib.ExitStack
) -> list[Service]:
    # Starts all services in order, and returns them. The stack stops them in reverse.
    say(f"Starting. This takes half a minute. Logs: {up_folder()}")
    credential = drawn_credential()
    prefect = prefect_service(prefect_port, credential, up_folder())
    _open(prefect, open_services)
    mlflow = mlflow_service(store, mlflow_port, credential, up_folder(), work_dir)
    if mlflow is not None:
        _open(mlflow, open_services)
    api_url = f"{prefect_port.url}/api"
    mlflow_url = "" if mlflow is None else mlflow_port.url
    tracking = {"MLFLOW_TRACKING_URI": mlflow_url or store}
    if mlflow is not None:
        user, _, password = credential.partition(":")
        tracking.update(MLFLOW_TRACKING_USERNAME=user, MLFLOW_TRACKING_PASSWORD=password)
    # Prefect must not be imported yet.
    os.environ.update(client_environment(api_url, credential), PREFECT_HOME=str(own_home()))
    record_servers(api_url, mlflow_url, credential)
    # Prefect's client takes seconds to import, which is less than the server takes to start.
    deployments = interrupts.aside(lambda: importlib.import_module("zerotune.flows.local_deployments"))
    prefect.wait_until_ready()
    deployments.apply_deployments(work_dir)
    lost = deployments.name_lost_runs()
    worker = worker_service(api_url, credential, tracking, up_folder())
    started_at = datetime.now(timezone.utc)
    _open(worker, open_services)
    open_services.enter_context(_runs_cancelled(deployments.cancel_runs))
    deployments.wait_for_worker(started_at)
    if mlflow is not None:
        mlflow.wait_until_ready()
    if lost:
        say(f"{lost} run(s) had lost their worker. They are Crashed now.")
    say("")
    say_link("Prefect UI:  ", prefect_port.url)
    if mlflow_url:
        say_link("MLflow UI:   ", mlflow_url)
    if not sys.stderr.isatty():
        say(f"A browser asks for user and password. They are in {shell_file()}: {USER}, and the text behind the colon.")
    say(f"Studies in:  {work_dir}" if mlflow_url else f"Studies in:  {work_dir}, and in {without_password(store)}")
    say("")
    say("Tune, in any terminal:")
    say(f"  . {shlex.quote(str(shell_file()))}")
    say("  prefect deployment run 'tune/local' --param config_path=/absolute/path/deepspeed.yaml --watch")
    say("")
    say("Stop everything: Ctrl-C here, or `zerotune down` in any terminal.")
    return [service for service in (prefect, mlflow, worker) if service is not None]


def _open(service: Service, open_services: contextlib.ExitStack) -> None:
    open_services.callback(service.close)
    service.start()


@contextlib.contextmanager
def _runs_cancelled(cancel_runs: Callable[[], int]) -> Iterator[None]:
    # Cancels all runs when its body ends. The worker is still running then and ends their processes.
    try:
        yield
    finally:
        # The server may have ended. The processes of its runs end with the worker anyway.
        with contextlib.suppress(Exception):
            cancelled = cancel_runs()
            if cancelled:
                say(f"{cancelled} run(s) cancelled. `zerotune resume` resumes a study.")


def _watch(services: list[Service]) -> None:
    """Starts services again that end by themselves, until a signal arrives.
    Raises ServerError: a service ended shortly after its start.
    """
    started = dict.fromkeys((service.name for service in services), time.monotonic())
    while True:
        time.sleep(_WATCH_S)
        interrupts.check()
        for service in services:
            if service.is_running:
                continue
            service.close()
            if time.monotonic() - started[service.name] < _TOO_SHORT_S:
                raise ServerError(f"{service.name} ended shortly after its start. Its log is {service.log}.")
            service.start()
            say(f"{service.name} ended and is started again. Its last log is {service.log_before}.")
            # The worker needs the server.
            service.wait_until_ready()
            started[service.name] = time.monotonic()


def _held_port(port: int, flag: str) -> HeldPort:
    try:
        return HeldPort(port)
    except OSError as error:
        remedy = f"Stop the program that listens there, or name another port: `zerotune up {flag} {port + 1}`."
        raise InputError(f"port {port} cannot be used ({error.strerror}).", where=flag, remedy=remedy) from None
