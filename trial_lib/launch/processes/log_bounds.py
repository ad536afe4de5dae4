"""Bounds the logs of processes that print without end. A log keeps its head and its tail.

The process that waits for the printing ones looks at their logs' sizes now and then. A pipe would wake it for each
line, on a rank's core.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LOOK_S = 0.5  # seconds between two looks; until the next one a log may grow beyond its bound

MOST_BYTES, KEPT_BYTES = 16 * 2**20, 4 * 2**20
"""A log that has more bytes keeps so many of its beginning, and as many of its end."""

_NOTICE = "\n[ZeroTune has left out {} bytes here.]\n"
_NOTICE_READ = re.compile(_NOTICE.replace("[", r"\[").replace("]", r"\]").format(r"(\d+)").encode())


def logs_of(request: dict[str, Any]) -> list[Path]:
    """Returns the logs of a launch, those of a sweep's later sizes included."""
    of_ranks = [rank["log"] for rank in request["ranks"]]
    of_sizes = [log for size in request["payload"].get("sizes", ()) for log in size["logs"]]
    return [Path(log) for log in dict.fromkeys([*of_ranks, *of_sizes])]


def bound(logs: Iterable[Path]) -> None:
    """Cuts the middle out of each log that is too long. What it cuts out is counted in the middle.

    Other processes append meanwhile, and lose no more than they print while this shortens the file.
    """
    for log in logs:
        # A program may have removed its log, and the study its folder.
        with contextlib.suppress(OSError):
            if log.stat().st_size > MOST_BYTES:
                _cut(log)


def _cut(log: Path) -> None:
    with log.open("rb+", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        before = _NOTICE_READ.match(os.pread(file.fileno(), len(_NOTICE) + 20, KEPT_BYTES))
        notice = _NOTICE.format(size - 2 * KEPT_BYTES + (int(before[1]) - len(before[0]) if before else 0)).encode()
        tail = os.pread(file.fileno(), 2 * KEPT_BYTES, size - KEPT_BYTES)
        os.pwrite(file.fileno(), notice + tail, KEPT_BYTES)
        file.truncate(KEPT_BYTES + len(notice) + len(tail))
