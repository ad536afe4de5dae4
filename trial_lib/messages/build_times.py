"""Builds of torch's extensions, such as DeepSpeed's ops: whether there is one to do, and when ranks of a trial build.

A deadline does not count the time of builds.

A rank imports this module, so it needs only the standard library.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from zerotune.trial_lib.messages.files import open_own
from zerotune.trial_lib.messages.orders import since_boot

# A longer build counts as hung.
_LONGEST_S = 1800.0
_BEGINS, _ENDS = "begins", "ends"


def has_work(folder: Path) -> bool:
    try:
        asked = subprocess.run(["ninja", "-n"], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return True
    return b"no work to do" not in asked.stdout


@contextlib.contextmanager
def noted(scratch: Path) -> Iterator[None]:
    """Records, in a rank, that it builds something, or waits for another's build, while this is entered."""
    _note(scratch, _BEGINS)
    try:
        yield
    finally:
        _note(scratch, _ENDS)


def seconds(scratch: Path) -> float:
    """The time until now in which any rank of a trial has built something, up to the longest build allowed."""
    try:
        lines = _file(scratch).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    building: set[str] = set()
    total, since = 0.0, 0.0
    # The hosts of a trial have only the wall clock in common.
    on_one_host = all(line.startswith(f"{os.uname().nodename}/") for line in lines)
    for line in lines:
        # A rank may not have finished the last line.
        with contextlib.suppress(ValueError):
            who, what, steady, wall = line.split()
            at = float(steady if on_one_host else wall)
            if what == _BEGINS:
                since = since if building else at
                building.add(who)
            elif who in building:
                building.discard(who)
                total += 0.0 if building else max(0.0, at - since)
    now = since_boot() if on_one_host else time.time()
    return min(total + (max(0.0, now - since) if building else 0.0), _LONGEST_S)


def _note(scratch: Path, what: str) -> None:
    # On a full disk the record is lost, and the deadline is not extended.
    with contextlib.suppress(OSError), open_own(_file(scratch), "a", encoding="utf-8") as file:
        file.write(f"{os.uname().nodename}/{os.getpid()} {what} {since_boot()} {time.time()}\n")


def _file(scratch: Path) -> Path:
    return scratch / "builds"
