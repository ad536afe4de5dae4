"""Which `zerotune up` is running: a lock and a record beside it, for `zerotune down` and other commands.

The lock ends with its holder. A record without a held lock is therefore out of date.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flows.owners_only import entry_link
from flows.prefect_server import LOOPBACK
from trial_lib.messages.errors import InputError
from trial_lib.messages.files import OWNERS_FILE, write_whole
from trial_lib.study.data_folder import data_folder, made_in_data_folder

_FOLDER = "up"  # in ZeroTune's data folder
_POLL_S = 0.1
_RECORDED_S = 2.0  # `zerotune up` writes its record as soon as it has the lock


def up_folder() -> Path:
    """Returns the folder with the lock, the record and the logs of `zerotune up`. Creates it if it is missing."""
    return made_in_data_folder(_FOLDER)


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """Makes this process the only `zerotune up` while the body runs.

    Raises:
        InputError: another one is running, or another process has its lock.
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
    """Returns the file that a shell reads to use the running Prefect server."""
    return up_folder() / "environment"


def record_servers(api_url: str, mlflow_url: str, credential: str) -> None:
    """Records the servers of this `zerotune up`, for the other commands of its owner and for shells.

    Args:
        api_url: Prefect's.
        mlflow_url: the address of MLflow's UI. Empty if there is none.
        credential: the owner's, for both.
    """
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
    from flows.prefect_server import past_proxies

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

    Raises:
        InputError: it has not stopped in time, or another process has its lock.
    """
    if not _is_held():
        return False
    deadline = time.monotonic() + timeout_s
    holder = _holder()
    with contextlib.suppress(ProcessLookupError):
        os.kill(holder, signal.SIGTERM)
    while _is_held():
        if time.monotonic() > deadline:
            raise InputError(
                f"it did not stop within {timeout_s:.0f} s.",
                where="zerotune up",
                remedy=f"Press Ctrl-C in its terminal, or kill it: `kill -9 {holder}`.",
            )
        time.sleep(_POLL_S)
    return True


def _holder() -> int:
    """Returns the process id of the `zerotune up` that has the lock.

    Raises:
        InputError: its holder is another process.
    """
    until = time.monotonic() + _RECORDED_S
    while (holder := _running().get("pid")) is None:
        if time.monotonic() > until:
            raise InputError(
                f"a process that is no `zerotune up` keeps {_lock()} locked (/proc/locks has its number).",
                where="zerotune up",
                remedy="End that process.",
            )
        time.sleep(_POLL_S)
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

    Raises:
        OSError: there is no such process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The second field is the program's name, which may contain spaces and parentheses. The start is the 22nd field.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{boot} {fields[19]}"


def _is_held() -> bool:
    try:
        with FileLock(_lock(), timeout=0, mode=OWNERS_FILE):
            return False
    except Timeout:
        return True
