"""`zerotune up` and `zerotune down`: a Prefect server, the MLflow UI and a worker, on loopback."""

import contextlib
import importlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from flows.interrupts import interrupts
from flows.servers.held_port import HeldPort
from flows.servers.local_servers import mlflow_service, prefect_service, worker_service
from flows.servers.owners_only import USER, drawn_credential
from flows.servers.prefect_server import client_environment, own_home
from flows.servers.running_servers import hold, record_servers, shell_file, stop, up_folder
from flows.servers.service import ServerError, Service
from flows.terminal import say, say_link
from trial_lib.tracking.tracking_uri import default_tracking_uri, without_password
from trial_lib.wire.errors import InputError

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
    """Starts all services in order, and returns them. The stack stops them in reverse."""
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
    deployments = interrupts.aside(lambda: importlib.import_module("flows.servers.local_deployments"))
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
    """Cancels all runs when its body ends. The worker is still running then and ends their processes."""
    try:
        yield
    finally:
        from flows.servers.local_deployments import cancel_runs

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
