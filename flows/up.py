"""What `zerotune up` and `zerotune down` do: a Prefect server, the MLflow UI and a worker, on loopback."""

import contextlib
import importlib
import os
import shlex
import socket
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from flows.interrupts import interrupts
from flows.local_servers import mlflow_service, prefect_service, worker_service
from flows.prefect_server import own_home, past_proxies
from flows.running_servers import hold, stop, up_folder
from flows.service import ServerError, Service
from flows.terminal import say
from trial_lib.experiment.errors import InputError
from trial_lib.tracking.tracking_uri import default_tracking_uri, without_password

_WATCH_S = 0.5
_END_S = 70.0  # runs are cancelled first, and a training may save
_TOO_SHORT_S = 30.0  # one that ends so soon after its start would only end again


def up_command(prefect_port: int, mlflow_port: int) -> int:
    """Starts everything, says where it is, and stops everything when it is interrupted.

    Returns:
        The exit code.

    Raises:
        InputError: it runs already, or a port is taken; nothing was started.
        ServerError: a server did not come up, or ended at once.
    """
    work_dir = Path.cwd()
    store = default_tracking_uri(work_dir)
    with interrupts.opening(), contextlib.ExitStack() as held:
        held.enter_context(hold())
        _check_port(prefect_port, "--prefect-port")
        _check_port(mlflow_port, "--mlflow-port")
        to_close = held.pop_all()
    interrupts.resume_command = "zerotune up"
    # A folder that nothing is imported from: what stands in the user's may have any name.
    os.chdir(own_home())
    with to_close, interrupts.noting(lambda: None, _END_S):
        try:
            with contextlib.ExitStack() as open_services:
                services = _start(work_dir, store, prefect_port, mlflow_port, open_services)
                interrupts.is_heeded = True
                _watch(services)
        except (KeyboardInterrupt, Exception):
            if not interrupts.heard:
                raise
    if interrupts.is_heeded:
        say("Everything is stopped.")
    return 0


def down_command() -> int:
    """Stops the `zerotune up` of another terminal; returns the exit code.

    Raises:
        InputError: it has not stopped.
    """
    say("Everything is stopped." if stop() else "zerotune up does not run.")
    return 0


def _start(
    work_dir: Path, store: str, prefect_port: int, mlflow_port: int, open_services: contextlib.ExitStack
) -> list[Service]:
    """Starts everything in order, and returns it; the stack ends it in the opposite order."""
    say(f"Starting; this takes half a minute. Logs: {up_folder()}")
    prefect = prefect_service(prefect_port, up_folder())
    _open(prefect, open_services)
    mlflow = mlflow_service(store, mlflow_port, up_folder(), work_dir)
    if mlflow is not None:
        _open(mlflow, open_services)
    api_url = f"http://127.0.0.1:{prefect_port}/api"
    tracking_uri = store if mlflow is None else f"http://127.0.0.1:{mlflow_port}"
    _use(api_url)
    # Prefect's client takes seconds to import, and the server longer to come up.
    deployments = interrupts.aside(lambda: importlib.import_module("flows.local_deployments"))
    prefect.wait_until_ready()
    deployments.apply_deployments(work_dir)
    lost = deployments.name_lost_runs()
    worker = worker_service(api_url, tracking_uri, up_folder())
    started_at = datetime.now(timezone.utc)
    _open(worker, open_services)
    open_services.enter_context(_runs_cancelled())
    deployments.wait_for_worker(started_at)
    if mlflow is not None:
        mlflow.wait_until_ready()
    if lost:
        say(f"{lost} run(s) had lost their worker: they are Crashed now.")
    _tell(api_url, tracking_uri, work_dir)
    return [service for service in (prefect, mlflow, worker) if service is not None]


def _open(service: Service, open_services: contextlib.ExitStack) -> None:
    open_services.callback(service.close)
    service.start()


def _use(api_url: str) -> None:
    """Points this process, in which Prefect is not imported yet, and its children at the server."""
    os.environ.update(PREFECT_API_URL=api_url, PREFECT_HOME=str(own_home()), **past_proxies())


@contextlib.contextmanager
def _runs_cancelled() -> Iterator[None]:
    """Cancels what runs when its body ends, while the worker is still there to see it through."""
    try:
        yield
    finally:
        from flows.local_deployments import cancel_runs

        # A server that is not there any more has nothing to say of its runs; their processes end with the worker.
        with contextlib.suppress(Exception):
            cancelled = cancel_runs()
            if cancelled:
                say(f"{cancelled} run(s) cancelled; `zerotune resume` goes on with a study.")


def _watch(services: list[Service]) -> None:
    """Starts again what ends by itself, until it is interrupted.

    Raises:
        ServerError: something ended shortly after it was started.
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
                raise ServerError(f"{service.name} ended shortly after it was started; its log is {service.log}.")
            service.start()
            say(f"{service.name} has ended, and is started again; its log was {service.log_before}.")
            # The worker needs the server.
            service.wait_until_ready()
            started[service.name] = time.monotonic()


def _check_port(port: int, flag: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"port {port} cannot be used ({error.strerror}).",
                where=flag,
                remedy=f"Stop what listens there, or name another port: `zerotune up {flag} {port + 1}`.",
            ) from None


def _tell(api_url: str, tracking_uri: str, work_dir: Path) -> None:
    say("")
    say(f"Prefect UI:  {api_url.removesuffix('/api')}")
    say(f"MLflow UI:   {without_password(tracking_uri)}")
    say(f"Studies in:  {work_dir}")
    say("")
    say("Tune, from any terminal:")
    say(f"  export PREFECT_API_URL={shlex.quote(api_url)}")
    say("  prefect deployment run 'tune/local' --param config_path=/absolute/path/deepspeed.yaml --watch")
    say("")
    say("Stop everything: Ctrl-C, or `zerotune down` from any terminal.")
