"""The Prefect server of a command: the user's, if one is configured, or else one of its own on loopback."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from flows.interrupts import interrupts
from flows.servers.held_port import LOOPBACK, HeldPort
from flows.servers.owners_only import CREDENTIAL, drawn_credential
from flows.servers.service import ServerError, Service, migrate
from trial_lib.slots.ports import reserved_port
from trial_lib.study.kept.data_folder import made_in_data_folder, require_data_folder
from trial_lib.tracking.tracking_uri import in_uri
from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import make_own

# A folder in ZeroTune's data folder.
_HOME = "prefect"
_KEEP_S = 1.0
# A server is asked for a sign of life so often. One that was silent for so long hangs, unless it is starting. The
# first request of a flow is tried again for longer than that.
_LOOK_S, _SILENT_S, _STARTS_S = 4.0, 12.0, 120.0
_LOCK_POLL_S = 0.5
# This process, the fork server of the ranks and Prefect's server import for seconds.
_AT_ONCE = 3

# A server for one command does not need these.
_IDLE_SERVICES = (
    "SCHEDULER",
    "LATE_RUNS",
    "PAUSE_EXPIRATIONS",
    "CANCELLATION_CLEANUP",
    "CLEANUP_RECONCILER",
    "FOREMAN",
    "REPOSSESSOR",
    "TRIGGERS",
)
# A study has no block. To list them, the server would import each installed collection of Prefect's, as for Docker.
_NO_BLOCKS = {
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}


class PrefectServer:
    """The command's own server, with its database in ZeroTune's data folder. It starts in the background.

    On a host with few cores it starts when this process has done its imports. Otherwise the fork server would have to
    share its core, and the first trial waits for that.

    If it is killed or hangs, it is started again. The study does not need it, but Prefect's record would end there.

    Attributes:
        api_url: the URL of its API, once it is ready.
        client_environment: the variables with which Prefect's clients use it.
    """

    def __init__(self) -> None:
        migrate_own_database()
        with reserved_port() as free:
            self._port = HeldPort(free)
        idle = {f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in _IDLE_SERVICES}
        settings = {**idle, **_NO_BLOCKS}
        credential, log = drawn_credential(), own_home() / "server.log"
        self._service = own_service(self._port, credential, log, settings, shares_log=True)
        self.api_url = f"{self._port.url}/api"
        self.client_environment = client_environment(self.api_url, credential)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._has_started = False
        if len(os.sched_getaffinity(0)) >= _AT_ONCE:
            self.start()

    def start(self) -> None:
        """Starts it, unless it has started."""
        if not self._has_started:
            self._has_started = True
            self._service.start()

    def wait_until_ready(self) -> None:
        """Waits until the server answers. Starts it, if nobody has.

        Raises:
            ServerError: it ended, or did not answer in time.
        """
        self.start()
        try:
            self._service.wait_until_ready()
        except ServerError:
            self.close()
            raise
        threading.Thread(target=self._keep, daemon=True, name="keep-server").start()

    def use(self) -> None:
        """Has this process use the server. Prefect must not be imported yet."""
        os.environ.update(self.client_environment, PREFECT_HOME=str(own_home()))

    def _keep(self) -> None:
        patient_until, look_at = time.monotonic() + _SILENT_S, 0.0
        while not self._closing.wait(_KEEP_S):
            now, hangs = time.monotonic(), False
            if now >= look_at:
                look_at = now + _LOOK_S
                answers = self._service.answers()
                patient_until = max(patient_until, now + _SILENT_S) if answers else patient_until
                hangs = not answers and time.monotonic() > patient_until
            with self._lock:
                if self._closing.is_set():
                    return
                if hangs:
                    self._service.kill()
                # A host without memory or processes may have some in a second.
                with contextlib.suppress(OSError):
                    if not self._service.is_running:
                        self._service.start()
                        patient_until = time.monotonic() + _STARTS_S

    def close(self) -> None:
        """Stops the server."""
        self._closing.set()
        with self._lock:
            self._service.close()
        self._port.close()


def own_service(
    port: HeldPort, credential: str, log: Path, settings: Mapping[str, str], shares_log: bool = False
) -> Service:
    """Returns a Prefect server over ZeroTune's own database, which must be migrated.

    Args:
        port: its port.
        credential: its owner's.
        log: the file for its output.
        settings: Prefect's settings, as environment variables, in addition to `own_environment`.
        shares_log: whether other servers write to the same log.
    """
    environment = {
        **own_environment(own_home()),
        "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",
        # Relative, because a page may call this host `localhost`, or come through a tunnel from another port.
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": port.url,
        CREDENTIAL: credential,
        **settings,
    }
    return Service("The Prefect server", server_command("prefect", port), environment, log, port, shares_log)


def server_command(kind: str, port: HeldPort) -> list[str]:
    """Returns the command of a server of ZeroTune's own, `prefect` or `mlflow`."""
    where = ["--port", str(port.number), "--listener", str(port.descriptor)]
    return [sys.executable, str(Path(__file__).with_name("own_server.py")), kind, *where]


def client_environment(api_url: str, credential: str) -> dict[str, str]:
    """Returns the variables with which Prefect's clients use a server of ZeroTune's own."""
    return {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": credential, **past_proxies()}


def own_home() -> Path:
    """Returns the Prefect home of ZeroTune's own servers. Creates it if it is missing."""
    return made_in_data_folder(_HOME)


def own_environment(home: Path) -> dict[str, str]:
    """Returns the environment of ZeroTune's own servers."""
    return {
        # The user's settings for a server of their own are not for this one.
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_SERVER_")},
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{in_uri(home / 'prefect.db')}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    }


def past_proxies() -> dict[str, str]:
    """Returns the variables, in both spellings, that keep requests to loopback off any proxy."""
    # If both are set, Python's clients read only the lower case one.
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    hosts = own if own == "*" else ",".join(filter(None, (own, LOOPBACK)))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def migrate_own_database() -> None:
    """Migrates the database of ZeroTune's own server to this Prefect's schema. It takes seconds, once per version.

    The server could do it, but it would exceed its own time-out with a new database.

    Raises:
        ServerError: the migration failed.
        KeyboardInterrupt: a signal has arrived.
    """
    home = own_home()
    done = home / f"migrated-{version('prefect')}"
    with _migration_lock(home):
        if done.exists() and (home / "prefect.db").exists():
            return
        make_own(home / "prefect.db")
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
        # Python searches its working folder for modules, and the user's may contain one with a name of Prefect's.
        migrate(
            f"Prefect could not migrate its database {home / 'prefect.db'}",
            command,
            own_environment(home),
            folder=home,
            log=home / "migration.log",
            remedy="Move the file away to start with an empty one.",
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
    """Returns whether the user has configured a Prefect server, by PREFECT_API_URL or in the active profile."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    home = Path(os.environ.get("PREFECT_HOME") or os.path.expanduser("~/.prefect"))  # noqa: PTH111 - Path.home raises without a home
    if not (home / "profiles.toml").exists():
        return False
    from prefect.settings import get_current_settings

    return get_current_settings().api.url is not None


def require_configured_server() -> None:
    """Checks that the user's server answers.

    Raises:
        ServerError: it does not answer, or refuses this user.
    """
    from prefect.client.orchestration import get_client

    from tasks.telling import impatient

    with impatient(retries=1), get_client(sync_client=True) as client:
        error = client.api_healthcheck()
        if error is None:
            return
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise ServerError(
                f"PREFECT_API_URL: the Prefect server {client.api_url} refuses this user. Set "
                "PREFECT_API_AUTH_STRING. `zerotune up` prints a line that sets it for its own server."
            )
        raise ServerError(
            f"PREFECT_API_URL: the Prefect server {client.api_url} does not answer ({error}). "
            "Start it, or unset the variable (and your profile's) to have ZeroTune start one."
        )


def require_home() -> None:
    """Checks that the command's own Prefect server, if it needs one, can write its database.

    Raises:
        InputError: its folder cannot be written.
    """
    if not is_configured():
        require_data_folder(_HOME)


def require_server_for_all(ray_address: str | None) -> None:
    """Checks that all hosts of a Ray cluster can reach the Prefect server. The command's own listens on loopback.

    Raises:
        InputError: some hosts cannot reach it.
    """
    if ray_address is None or is_configured():
        return
    # Other studies do not need Ray.
    from trial_lib.study.opening.choose_place import connect_to_ray

    connect_to_ray(ray_address)
    from trial_lib.launch.ray.cluster import has_other_machines

    if has_other_machines():
        raise InputError(
            "the other hosts of the cluster cannot reach the Prefect server that zerotune starts for itself.",
            where=f"--ray {ray_address}",
            remedy="Start one with `prefect server start --host 0.0.0.0`, and set PREFECT_API_URL to its address.",
        )


@contextlib.contextmanager
def prefect_server() -> Iterator[PrefectServer | None]:
    """Yields the command's own server while it starts, and stops it at the end. Yields None if the user has one."""
    if is_configured():
        yield None
        return
    server = PrefectServer()
    try:
        yield server
    finally:
        server.close()
