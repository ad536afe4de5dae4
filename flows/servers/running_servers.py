"""Which `zerotune up` is running: a lock and a record beside it, for `zerotune down` and a second `zerotune up`.

The lock ends with its holder. A record without a held lock is therefore out of date.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from trial_lib.study.kept.data_folder import made_in_data_folder
from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import write_whole

_POLL_S = 0.1


def up_folder() -> Path:
    """Returns the folder with the lock, the record and the logs of `zerotune up`. Creates it if it is missing."""
    return made_in_data_folder("up")


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """Makes this process the only `zerotune up` while the body runs.

    Raises:
        InputError: another one is running.
    """
    lock = FileLock(up_folder() / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            "it is already running.", where="zerotune up", remedy="`zerotune down` stops it, from any terminal."
        ) from None
    try:
        write_whole(_record(), json.dumps({"pid": os.getpid(), "start": start_of(os.getpid())}))
        yield
    finally:
        lock.release()


def stop(timeout_s: float = 60.0) -> bool:
    """Interrupts the running `zerotune up` and waits for its end. Returns whether one was running.

    Raises:
        InputError: it has not stopped in time.
    """
    if not _is_held():
        return False
    deadline = time.monotonic() + timeout_s
    asked = False
    while _is_held():
        # It may not have written its record yet.
        holder = None if asked else _holder()
        if holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGTERM)
            asked = True
        if time.monotonic() > deadline:
            raise InputError(
                f"it did not stop within {timeout_s:.0f} s.",
                where="zerotune up",
                remedy="Press Ctrl-C in its terminal.",
            )
        time.sleep(_POLL_S)
    return True


def _record() -> Path:
    return up_folder() / "up.json"


def _holder() -> int | None:
    """Returns the record's process id. Returns None if another process has that id now."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        record = json.loads(_record().read_text())
        pid = int(record["pid"])
        if start_of(pid) == record["start"]:
            return pid
    return None


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
        with FileLock(up_folder() / "lock", timeout=0):
            return False
    except Timeout:
        return True
