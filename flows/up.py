"""`zerotune up` and `zerotune down`: a Prefect server, the MLflow UI and a worker, on loopback."""

import contextlib
import importlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Crashed

from flows.interrupts import interrupts
from flows.owners_only import CREDENTIAL, USER, drawn_credential
from flows.prefect_server import (
    LOOPBACK,
    HeldPort,
    ServerError,
    Service,
    client_environment,
    migrate,
    migrate_own_database,
    own_environment,
    own_home,
    own_service,
    run_to_end,
    server_command,
)
from flows.running_servers import hold, record_servers, shell_file, stop, up_folder
from flows.terminal import say, say_link
from trial_lib.messages.errors import InputError
from trial_lib.tracking.runs import schema_lock
from trial_lib.tracking.tracking_uri import artifact_location, default_tracking_uri, sqlite_file, without_password

# The processes of `zerotune up`: a Prefect server, the MLflow UI and a worker. Each ends with its parent.


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


_WATCH_S = 0.5
_END_S = 70.0  # runs are cancelled first, and a training may save a checkpoint
_TOO_SHORT_S = 30.0  # a service that ends so soon after its start would end again


def up_command(prefect_port: int, mlflow_port: int) -> int:
    """Starts all services, prints their addresses, and stops them when a signal arrives.

    Returns:
        The exit code.

    Raises:
        InputError: it is already running, or a port is taken. Nothing was started.
        ServerError: a service did not start, or ended soon after its start.
    """
    work_dir = Path.cwd()
    store = default_tracking_uri(work_dir)
    with interrupts.opening(), contextlib.ExitStack() as held:
        held.enter_context(hold())
        ports = [
            held.enter_context(_held_port(prefect_port, "--prefect-port")),
            held.enter_context(_held_port(mlflow_port, "--mlflow-port")),
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
    """Stops the running `zerotune up`. Returns the exit code.

    Raises:
        InputError: it has not stopped.
    """
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
    deployments = interrupts.aside(lambda: importlib.import_module("flows.up"))
    prefect.wait_until_ready()
    deployments.apply_deployments(work_dir)
    lost = deployments.name_lost_runs()
    worker = worker_service(api_url, credential, tracking, up_folder())
    started_at = datetime.now(timezone.utc)
    _open(worker, open_services)
    open_services.enter_context(_runs_cancelled())
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
def _runs_cancelled() -> Iterator[None]:
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

    Raises:
        ServerError: a service ended shortly after its start.
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
        raise InputError(
            f"port {port} cannot be used ({error.strerror}).",
            where=flag,
            remedy=f"Stop the program that listens there, or name another port: `zerotune up {flag} {port + 1}`.",
        ) from None


# What `zerotune up` sets up on its Prefect server: the work pool, the deployments, the states of lost runs.


DEPLOYMENTS = Path(__file__).parents[1] / "deployments"
_LOCAL, _NIGHTLY = "local", "nightly"  # deployments of the flow tune; each other flow has a local one too
_TAG = "zerotune"  # the automation watches the runs of deployments with this tag
_CANCEL_S = 35.0  # a full experiment may use 20 s of them to save a checkpoint
_WORKER_S = 120.0
_POLL_S = 0.2
_IN_POOL = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
_BEGUN = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
_IN_BEGUN = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(_BEGUN)))


def apply_deployments(work_dir: Path) -> None:
    """Creates or updates the work pool, its deployments and the automation that detects killed runs.

    Edits by people are kept: the nightly deployment's schedule and parameters, and the pool's limit, pause and
    description.

    Args:
        work_dir: the folder in which runs write their studies.

    Raises:
        ServerError: Prefect refused the deployments.
    """
    with get_client(sync_client=True) as client:
        template = json.loads((DEPLOYMENTS / "work_pools" / "process.json").read_text())
        # With this command a run starts in this interpreter at once. Else Prefect starts another one first.
        command = shlex.join([sys.executable, "-m", "prefect.engine"])
        template["variables"]["properties"]["command"]["default"] = command
        _put_pool(client, template)
        nightly = _find(client, f"tune/{_NIGHTLY}")
        _deploy([_LOCAL] if nightly else [_LOCAL, _NIGHTLY], work_dir)
        if nightly is not None:
            schema = client.read_deployment_by_name(f"tune/{_LOCAL}").parameter_openapi_schema
            update = DeploymentUpdate(
                parameter_openapi_schema=schema,
                parameters={**nightly.parameters, "work_dir": str(work_dir)},
                tags=sorted({*nightly.tags, _TAG}),
            )
            client.update_deployment(nightly.id, update)
        for described in yaml.safe_load((DEPLOYMENTS / "automations.yaml").read_text())["automations"]:
            _put(client, AutomationCore.model_validate(described))


def _put_pool(client: SyncPrefectClient, template: dict[str, Any]) -> None:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    else:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))


def _put(client: SyncPrefectClient, automation: AutomationCore) -> None:
    known = client.read_automations_by_name(automation.name)
    if known:
        # People may have switched it off.
        automation = automation.model_copy(update={"enabled": known[0].enabled})
        client.update_automation(known[0].id, automation)
    else:
        client.create_automation(automation)


def _find(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _deploy(names: list[str], work_dir: Path) -> None:
    named = [word for name in names for word in ("--name", name)]
    command = [
        *(sys.executable, "-m", "prefect", "--no-prompt", "deploy"),
        *("--prefect-file", str(DEPLOYMENTS / "prefect.yaml"), *named),
    ]
    environment = {**os.environ, "PWD": str(work_dir)}
    exit_code, said = run_to_end(command, environment, folder=own_home(), log=up_folder() / "deploy.log")
    if exit_code != 0:
        raise ServerError(f"Prefect refused the deployments in {DEPLOYMENTS}: {said}")


def name_lost_runs() -> int:
    """Sets runs whose worker has died to Crashed. Returns how many there were."""
    with get_client(sync_client=True) as client:
        lost = _begun(client)
        for run in [*lost, *_begun_within(client, lost)]:
            message = "Its worker was killed. `zerotune resume` resumes its study."
            client.set_flow_run_state(run.id, Crashed(message=message), force=True)
    return len(lost)


def cancel_runs() -> int:
    """Cancels all runs, and waits up to `_CANCEL_S` for their end. Returns how many there were."""
    with get_client(sync_client=True) as client:
        begun = _begun(client)
        for run in begun:
            client.set_flow_run_state(run.id, Cancelling())
        deadline = time.monotonic() + _CANCEL_S
        while _begun(client) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return len(begun)


def _begun(client: SyncPrefectClient) -> list[FlowRun]:
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(state=_IN_BEGUN), work_pool_filter=_IN_POOL)


def _begun_within(client: SyncPrefectClient, runs: list[FlowRun]) -> list[FlowRun]:
    # The full experiments that these runs have begun. Those are in no work pool.
    if not runs:
        return []
    parents = FlowRunFilterParentFlowRunId(any_=[run.id for run in runs])
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(state=_IN_BEGUN, parent_flow_run_id=parents))


def wait_for_worker(since: datetime) -> None:
    """Waits for the first heartbeat of a worker.

    Args:
        since: when the worker was started. Earlier heartbeats are another worker's.

    Raises:
        ServerError: no heartbeat came within `_WORKER_S`.
    """
    deadline = time.monotonic() + _WORKER_S
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            interrupts.check()
            heard = [worker.last_heartbeat_time for worker in client.read_workers_for_work_pool(POOL)]
            if any(moment is not None and moment >= since for moment in heard):
                return
            time.sleep(_POLL_S)
    raise ServerError("The worker did not start.")
