"""The Prefect server of a command: the user's, if one is configured, or else one of its own on loopback."""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from zerotune.flows.interrupts import interrupts
from zerotune.flows.own_server import CREDENTIAL, LOOPBACK, drawn_credential, entry_link
from zerotune.trial_lib.launch.locks import reserved_port
from zerotune.trial_lib.launch.processes.watchdog import TiedProcess
from zerotune.trial_lib.messages.errors import InputError, chain_of
from zerotune.trial_lib.messages.files import OWNERS_FILE, make_own, write_whole
from zerotune.trial_lib.messages.orders import this_boot
from zerotune.trial_lib.study.folder import data_folder, made_in_data_folder, require_data_folder
from zerotune.trial_lib.tracking.tracking_uri import in_uri

# A port that stays this process's own while its server is starting, or starting again.


class HeldPort:
    """A port of loopback at which no process can listen but those that are handed its socket.

    Another user could otherwise listen there while the server is not up. Clients would then send the credential to
    that user's server, and a worker would run what it asks for. Raises OSError: another process has the port.
    """

    def __init__(self, port: int) -> None:
        self.number, self.url = port, f"http://{LOOPBACK}:{port}"
        self._socket = socket.socket()
        try:
            # Connections of an earlier server may linger. Afterwards nobody may share the port.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((LOOPBACK, port))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            self._socket.close()
            raise

    @property
    def descriptor(self) -> int:
        """The descriptor of the socket, for a server: see `HandedSocket`."""
        return self._socket.fileno()

    @property
    def is_listening(self) -> bool:
        """Whether a server listens at this socket. No other socket of the port can listen meanwhile."""
        return bool(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    def refuse(self) -> None:
        """Refuses connections until the next server listens. Without this they would wait for it."""
        # First, because others could bind the port while this socket neither listens nor forbids it.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        # A socket that is shut down before it listens would never accept.
        if self.is_listening:
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


OUT_OF_PROCESSES = (
    "this user or container has reached its limit of processes and threads. Raise the limit (`ulimit -u`, or "
    "`--pids-limit` of a container), or end some."
)


def is_out_of_processes(error: BaseException) -> bool:
    """Returns whether an error, or one that caused it, means that no further process or thread can start."""
    return any(
        (isinstance(each, RuntimeError) and "can't start new thread" in str(each))
        or (isinstance(each, OSError) and each.errno == errno.EAGAIN)
        for each in chain_of(error)
    )


# A server as a child process. It ends when the process that has started it ends.

_READY_S = 180.0
_POLL_S = 0.05
# A library that cannot start a thread ends in one of these words, or in an abort.
_NO_PROCESS = re.compile(r"can't start new thread|Resource temporarily unavailable|pthread_create failed|Errno 11\b")


class ServerError(RuntimeError): ...


@dataclass
class Service:
    name: str  # for messages, such as `The MLflow UI`
    command: list[str]  # the words of its command. No shell is used.
    environment: dict[str, str]  # all of its environment variables
    log: Path  # the file with its output since its start
    # At which it refuses a request without a credential once it is ready. None if it listens to no port.
    port: HeldPort | None = None
    shares_log: bool = False  # whether other processes write to the same log
    _process: TiedProcess | None = field(default=None, init=False)

    def start(self) -> None:
        """Starts it. A log that it does not share begins anew, and the previous one is kept as `log_before`."""
        if not self.shares_log:
            with contextlib.suppress(FileNotFoundError):
                self.log.replace(self.log_before)
        descriptors = []
        if self.port is not None:
            self.port.refuse()
            descriptors.append(self.port.descriptor)
        self._process = TiedProcess(self.command, self.environment, self.log, descriptors=descriptors)

    @property
    def log_before(self) -> Path:
        return self.log.with_suffix(".before.log")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_running

    def wait_until_ready(self) -> None:
        """Raises ServerError: it ended, or did not answer within `_READY_S`."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and self.is_running:
            interrupts.check()
            if self.answers():
                return
            time.sleep(_POLL_S)
        raise ServerError(f"{self.name} did not start. Its log is {self.log}.")

    def answers(self) -> bool:
        if self.port is None:
            return True
        # An answer at this port would be another process's.
        if not self.port.is_listening:
            return False
        # `zerotune --help` has no time for this import.
        import http.client
        import urllib.error
        import urllib.request

        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            direct.open(self.port.url, timeout=2).close()
        except urllib.error.HTTPError as refusal:
            return refusal.code == 401
        except (OSError, http.client.HTTPException):
            pass
        return False

    def kill(self) -> None:
        """Kills it, if it can no longer end in order, with all processes that it has started."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends it and all processes that it has started. Returns when they are gone."""
        if self._process is not None:
            self._process.close()


def run_to_end(command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> tuple[int, str]:
    """Runs a command, which ends with this process. Returns its exit code and its output. The log begins anew."""
    log.unlink(missing_ok=True)
    process = TiedProcess(command, environment, log, folder)
    try:
        while process.is_running:
            interrupts.check()
            time.sleep(_POLL_S)
    finally:
        process.close()
    return process.status or 0, log.read_text(errors="replace").strip()


def migrate(
    what: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, remedy: str = ""
) -> None:
    """Runs a command that migrates a database. `what` begins the error: `Prefect could not migrate FILE`.
    Raises ServerError: the migration failed.
    """
    exit_code, output = run_to_end(command, environment, folder, log)
    if exit_code != 0:
        last = (output.splitlines() or ["it printed nothing"])[-1]
        if _NO_PROCESS.search(output):
            remedy = f"The cause: {OUT_OF_PROCESSES}"
        raise ServerError(" ".join(filter(None, (f"{what} to its schema ({last}).", remedy))))


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
    *("SCHEDULER", "LATE_RUNS", "PAUSE_EXPIRATIONS", "CANCELLATION_CLEANUP", "CLEANUP_RECONCILER", "FOREMAN"),
    *("REPOSSESSOR", "TRIGGERS"),
)
# A study has no block. To list them, the server would import each installed collection of Prefect's, as for Docker.
_NO_BLOCKS = {
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}


class PrefectServer:
    """The command's own server, with its database in ZeroTune's data folder. It starts in the background.

    On a host with few cores it starts when this process has done its imports. Otherwise the fork server would have
    to share its core, and the first trial waits for that.

    If it is killed or hangs, it is started again. The study does not need it, but Prefect's record would end there.
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
        if not self._has_started:
            self._has_started = True
            self._service.start()

    def wait_until_ready(self) -> None:
        """Starts the server, if nobody has. Raises ServerError: it ended, or did not answer in time."""
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
        self._closing.set()
        with self._lock:
            self._service.close()
        self._port.close()


def own_service(
    port: HeldPort, credential: str, log: Path, settings: Mapping[str, str], shares_log: bool = False
) -> Service:
    """Returns a Prefect server over ZeroTune's own database, which must be migrated."""
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
    where = ["--port", str(port.number), "--listener", str(port.descriptor)]
    return [sys.executable, str(Path(__file__).with_name("own_server.py")), kind, *where]


def client_environment(api_url: str, credential: str) -> dict[str, str]:
    return {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": credential, **past_proxies()}


def own_home() -> Path:
    return made_in_data_folder(_HOME)


def own_environment(home: Path) -> dict[str, str]:
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

    The server could do it, but it would exceed its own time-out with a new database. Raises ServerError: it failed.
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
    """Checks that the user's server answers. Raises ServerError: it does not answer, or refuses this user."""
    from prefect.client.orchestration import get_client

    from zerotune.tasks.telling import impatient

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
    if not is_configured():
        require_data_folder(_HOME)


def require_server_for_all(ray_address: str | None) -> None:
    """Checks that all hosts of a Ray cluster can reach the Prefect server. The command's own listens on loopback.
    Raises InputError: some hosts cannot reach it.
    """
    if ray_address is None or is_configured():
        return
    # Other studies do not need Ray.
    from zerotune.trial_lib.study.setup import connect_to_ray

    connect_to_ray(ray_address)
    from zerotune.trial_lib.launch.ray_cluster import has_other_machines

    if has_other_machines():
        what = "the other hosts of the cluster cannot reach the Prefect server that zerotune starts for itself."
        remedy = "Start one with `prefect server start --host 0.0.0.0`, and set PREFECT_API_URL to its address."
        raise InputError(what, where=f"--ray {ray_address}", remedy=remedy)


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


# Which `zerotune up` is running: a lock and a record beside it. A record without a held lock is out of date.

_FOLDER = "up"  # in ZeroTune's data folder
_LOOK_AGAIN_S = 0.1
_RECORDED_S = 2.0  # `zerotune up` writes its record as soon as it has the lock


def up_folder() -> Path:
    return made_in_data_folder(_FOLDER)


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """Makes this process the only `zerotune up` while the body runs.
    Raises InputError: another one is running, or another process has its lock.
    """
    lock = FileLock(_lock(), mode=OWNERS_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _holder()
        raise InputError(
            "it is already running.", where="zerotune up", remedy="`zerotune down` stops it, from any terminal."
        ) from None
    try:
        _write_record()
        yield
    finally:
        for file in (_record(), shell_file()):
            file.unlink(missing_ok=True)
        lock.release()


def shell_file() -> Path:
    return up_folder() / "environment"


def record_servers(api_url: str, mlflow_url: str, credential: str) -> None:
    """Records the servers of this `zerotune up`, for the other commands of its owner and for shells."""
    _write_record(PREFECT_API_URL=api_url, MLFLOW_TRACKING_URI=mlflow_url, credential=credential)
    lines = [
        f"export PREFECT_API_URL={api_url} PREFECT_API_AUTH_STRING={credential}",
        # A proxy would read the credential.
        *(f'export {name}="${{{name}:+${name},}}{LOOPBACK}"' for name in ("NO_PROXY", "no_proxy")),
    ]
    write_whole(shell_file(), "\n".join([*lines, ""]))


def log_in() -> None:
    """Gives this process the credential of the running `zerotune up`, if the user's variables name its servers."""
    own = f"http://{LOOPBACK}:"
    named = {
        name: os.environ.get(name, "").rstrip("/").replace("http://localhost:", own)
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
    }
    if not any(url.startswith(own) for url in named.values()):
        return
    record = _running()
    credential = record.get("credential", "")
    ours = {name for name, url in named.items() if credential and url == record[name]}
    if not ours:
        return
    # A proxy would read the credential.
    os.environ.update(past_proxies())
    # They pass by it under this name only.
    os.environ.update({name: named[name] for name in ours})
    user, _, password = credential.partition(":")
    if "PREFECT_API_URL" in ours:
        os.environ["PREFECT_API_AUTH_STRING"] = credential
    if "MLFLOW_TRACKING_URI" in ours:
        os.environ.update(MLFLOW_TRACKING_USERNAME=user, MLFLOW_TRACKING_PASSWORD=password)


def stop(timeout_s: float = 60.0) -> bool:
    """Interrupts the running `zerotune up` and waits for its end. Returns whether one was running.
    Raises InputError: it has not stopped in time, or another process has its lock.
    """
    if not _is_held():
        return False
    deadline = time.monotonic() + timeout_s
    holder = _holder()
    with contextlib.suppress(ProcessLookupError):
        os.kill(holder, signal.SIGTERM)
    while _is_held():
        if time.monotonic() > deadline:
            remedy = f"Press Ctrl-C in its terminal, or kill it: `kill -9 {holder}`."
            raise InputError(f"it did not stop within {timeout_s:.0f} s.", where="zerotune up", remedy=remedy)
        time.sleep(_LOOK_AGAIN_S)
    return True


def _holder() -> int:
    until = time.monotonic() + _RECORDED_S
    while (holder := _running().get("pid")) is None:
        if time.monotonic() > until:
            what = f"a process that is no `zerotune up` keeps {_lock()} locked (/proc/locks has its number)."
            raise InputError(what, where="zerotune up", remedy="End that process.")
        time.sleep(_LOOK_AGAIN_S)
    return int(holder)


def _lock() -> Path:
    return up_folder() / "lock"


def _record() -> Path:
    return data_folder() / _FOLDER / "up.json"


def link_for_a_person(address: str) -> str:
    """Returns an address of the running `zerotune up` with its login, if a terminal shows it; any other as it is."""
    record = _running()
    servers = (record.get("PREFECT_API_URL", "").removesuffix("/api"), record.get("MLFLOW_TRACKING_URI", ""))
    server = next((server for server in servers if server and f"{address}/".startswith(f"{server}/")), None)
    # A log would keep it.
    if server is None or not sys.stderr.isatty():
        return address
    return entry_link(server, record["credential"], address.removeprefix(server))


def _write_record(**servers: str) -> None:
    write_whole(_record(), json.dumps({"pid": os.getpid(), "start": start_of(os.getpid()), **servers}))


def _running() -> dict[str, Any]:
    # The record. It is empty if another process has the record's process id now.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record: dict[str, Any] = json.loads(_record().read_text())
        if start_of(record["pid"]) == record["start"]:
            return record
    return {}


def start_of(pid: int) -> str:
    """Returns the boot id and the clock tick at which a process started. Neither can be set, unlike the time of day.
    Raises OSError: there is no such process.
    """
    # The second field is the program's name, which may contain spaces and parentheses. The start is the 22nd field.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{this_boot()} {fields[19]}"


def _is_held() -> bool:
    try:
        with FileLock(_lock(), timeout=0, mode=OWNERS_FILE):
            return False
    except Timeout:
        return True
