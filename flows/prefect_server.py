"""The Prefect server that a command runs against: the one that is configured, or one of its own on loopback."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from flows.interrupts import interrupts
from flows.service import LOOPBACK, ServerError, Service, run_to_end
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.files import OWNERS_FOLDER, make_own
from trial_lib.launch.lock_dir import host_lock_dir
from trial_lib.launch.ports import reserved_port
from trial_lib.study.data_folder import made_in_data_folder, require_data_folder
from trial_lib.tracking.tracking_uri import in_uri

# In ZeroTune's own folder.
_HOME = "prefect"
_KEEP_S = 1.0
_LOCK_POLL_S = 0.5

# What a server for one command has no use for.
_IDLE_SERVICES = ("SCHEDULER", "LATE_RUNS", "PAUSE_EXPIRATIONS", "CANCELLATION_CLEANUP", "FOREMAN", "TRIGGERS")


class PrefectServer:
    """A server of the command's own, with its database in ZeroTune's folder; it comes up in the background.

    One that is killed is started again: the work goes on without it, but its record would end there.

    Attributes:
        api_url: where it answers, once it is ready.
    """

    def __init__(self) -> None:
        migrate_own_database()
        # Its own for as long as it may have to be started again: a port of the kernel's goes to the next connection.
        self._held = contextlib.ExitStack()
        self._port = self._held.enter_context(reserved_port(host_lock_dir()))
        settings = {f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in _IDLE_SERVICES}
        self._service = own_service(self._port, own_home() / "server.log", settings, shares_log=True)
        self.api_url = f"http://{LOOPBACK}:{self._port}/api"
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._service.start()

    def wait_until_ready(self) -> None:
        """Waits until the server answers.

        Raises:
            ServerError: it ended, or did not answer in three minutes.
        """
        try:
            self._service.wait_until_ready()
        except ServerError:
            self.close()
            raise
        threading.Thread(target=self._keep, daemon=True, name="keep-server").start()

    def use(self) -> None:
        """Points this process, in which Prefect must not be imported yet, at the server."""
        os.environ["PREFECT_API_URL"] = self.api_url
        os.environ["PREFECT_HOME"] = str(own_home())
        os.environ.update(past_proxies())

    def _keep(self) -> None:
        while not self._closing.wait(_KEEP_S):
            with self._lock:
                if not self._service.is_running and not self._closing.is_set():
                    self._service.start()

    def close(self) -> None:
        """Stops the server."""
        self._closing.set()
        with self._lock:
            self._service.close()
        self._held.close()


def own_service(port: int, log: Path, settings: Mapping[str, str], shares_log: bool = False) -> Service:
    """Returns a Prefect server over ZeroTune's own database, which is migrated already.

    Args:
        port: of loopback.
        log: file of what it says.
        settings: Prefect's, as environment variables, besides those that every server of ours has.
        shares_log: whether other servers write to the same log.
    """
    program = str(Path(__file__).with_name("prefect_app.py"))
    command = [sys.executable, program, "--host", LOOPBACK, "--port", str(port)]
    environment = {
        **own_environment(own_home()),
        "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",
        **settings,
    }
    return Service("The Prefect server", command, environment, log, f"http://{LOOPBACK}:{port}/api/health", shares_log)


def own_home() -> Path:
    """Returns the Prefect home of ZeroTune's own servers, made where it is not there yet."""
    home = made_in_data_folder(_HOME)
    # One of an earlier version was anybody's to read.
    home.chmod(OWNERS_FOLDER)
    return home


def own_environment(home: Path) -> dict[str, str]:
    """Returns the environment of a server of ZeroTune's own."""
    return {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{in_uri(home / 'prefect.db')}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    }


def past_proxies() -> dict[str, str]:
    """Returns the variables, under both their names, by which what goes to loopback goes through no proxy."""
    # Where both are set, Python's clients read the lower case alone.
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    hosts = own if own == "*" else ",".join(filter(None, (own, LOOPBACK)))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def migrate_own_database() -> None:
    """Brings the database of ZeroTune's own server to this Prefect's schema; some ten seconds, once per version.

    Ahead of the server, which would run into its own time-out on a fresh home.

    Raises:
        ServerError: it could not.
        KeyboardInterrupt: a signal has been heard.
    """
    home = own_home()
    done = home / f"migrated-{version('prefect')}"
    with _migration_lock(home):
        if done.exists() and (home / "prefect.db").exists():
            return
        make_own(home / "prefect.db")
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
        # Python looks for modules where it runs, and the user's folder may have one of Prefect's name.
        exit_code, said_all = run_to_end(command, own_environment(home), folder=home, log=home / "migration.log")
        if exit_code != 0:
            said = said_all.splitlines() or ["it said nothing"]
            raise ServerError(
                f"Prefect could not bring its database {home / 'prefect.db'} to this version's schema ({said[-1]}). "
                "Move the file away to begin with an empty one."
            )
        done.touch()


@contextlib.contextmanager
def _migration_lock(home: Path) -> Iterator[None]:
    lock = FileLock(home / "migration.lock")
    while True:
        interrupts.check()
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=_LOCK_POLL_S)
            break
    try:
        yield
    finally:
        lock.release()


def is_configured() -> bool:
    """Returns whether the user has a Prefect server: by PREFECT_API_URL or in their active profile."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    home = Path(os.environ.get("PREFECT_HOME") or os.path.expanduser("~/.prefect"))  # noqa: PTH111 - Path's own raises where there is no home
    if not (home / "profiles.toml").exists():
        return False
    from prefect.settings import get_current_settings

    return get_current_settings().api.url is not None


def require_configured_server() -> None:
    """Makes sure that the user's server answers.

    Raises:
        ServerError: it does not.
    """
    from prefect.client.orchestration import get_client

    from tasks.telling import impatient

    with impatient(retries=1), get_client(sync_client=True) as client:
        error = client.api_healthcheck()
        if error is not None:
            raise ServerError(
                f"PREFECT_API_URL: the Prefect server {client.api_url} does not answer ({error}). "
                "Start it, or unset the variable (and your profile's) to have ZeroTune start one."
            )


def require_home() -> None:
    """Makes sure that a Prefect server of the command's own could keep its database.

    Raises:
        InputError: its folder cannot be written.
    """
    if not is_configured():
        require_data_folder(_HOME)


def require_server_for_all(ray_address: str | None) -> None:
    """Makes sure that all hosts of a Ray cluster can reach the Prefect server: the command's own is on loopback.

    Raises:
        InputError: some cannot.
    """
    if ray_address is None or is_configured():
        return
    # Only such a study needs it.
    from trial_lib.study.places import connect_to_ray

    connect_to_ray(ray_address)
    from trial_lib.launch.ray_cluster import has_other_machines

    if has_other_machines():
        raise InputError(
            "the other machines of the cluster cannot reach the Prefect server that zerotune starts for itself.",
            where=f"--ray {ray_address}",
            remedy="Start one for all, `prefect server start --host 0.0.0.0`, and set PREFECT_API_URL to its address.",
        )


@contextlib.contextmanager
def prefect_server() -> Iterator[PrefectServer | None]:
    """Yields a server that is coming up, or None where the user has one; it is stopped at the end."""
    if is_configured():
        yield None
        return
    server = PrefectServer()
    try:
        yield server
    finally:
        server.close()
