"""Which `zerotune up` runs, as `zerotune down` and a second one have to know: a lock, and a record beside it.

The lock dies with its holder, so that a record that was left behind names nobody.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from trial_lib.experiment.errors import InputError
from trial_lib.experiment.files import write_whole
from trial_lib.study.data_folder import made_in_data_folder

_POLL_S = 0.1


def up_folder() -> Path:
    """Returns the folder of `zerotune up`: its lock, its record and its logs; made where it is not there yet."""
    return made_in_data_folder("up")


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """Makes this process the one `zerotune up`.

    Raises:
        InputError: there is one.
    """
    lock = FileLock(up_folder() / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            "it runs already.", where="zerotune up", remedy="`zerotune down` stops it, from any terminal."
        ) from None
    try:
        write_whole(_record(), json.dumps({"pid": os.getpid(), "start": start_of(os.getpid())}))
        yield
    finally:
        lock.release()


def stop(timeout_s: float = 60.0) -> bool:
    """Interrupts the `zerotune up` that runs, and waits until it has stopped everything; returns whether there was one.

    Raises:
        InputError: it has not stopped.
    """
    if not _is_held():
        return False
    deadline = time.monotonic() + timeout_s
    asked = False
    while _is_held():
        # One that has only just begun may not have written its record yet.
        holder = None if asked else _holder()
        if holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGTERM)
            asked = True
        if time.monotonic() > deadline:
            raise InputError(
                f"it has not stopped within {timeout_s:.0f} s.",
                where="zerotune up",
                remedy="Press Ctrl-C in its terminal.",
            )
        time.sleep(_POLL_S)
    return True


def _record() -> Path:
    return up_folder() / "up.json"


def _holder() -> int | None:
    """Returns the number of the record's process, if it is still that one and not another with its number."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        record = json.loads(_record().read_text())
        pid = int(record["pid"])
        if start_of(pid) == record["start"]:
            return pid
    return None


def start_of(pid: int) -> str:
    """Returns which boot a process was started in, and at which tick of it: the time of day may be set while it runs.

    Raises:
        OSError: there is no such process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # What follows the name, which may hold anything: the state is the third field, the start the 22nd.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{boot} {fields[19]}"


def _is_held() -> bool:
    try:
        with FileLock(up_folder() / "lock", timeout=0):
            return False
    except Timeout:
        return True
