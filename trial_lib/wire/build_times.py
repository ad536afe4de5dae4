"""When the ranks of a trial build extensions of torch's, DeepSpeed's ops among them: a deadline passes over that time.

A rank imports this module from the user's environment: standard library only.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from trial_lib.wire.whole_files import open_own

# One that takes longer hangs.
_LONGEST_S = 1800.0
_BEGINS, _ENDS = "begins", "ends"


@contextlib.contextmanager
def noted(scratch: Path) -> Iterator[None]:
    """Notes, in a rank, that it builds something as long as this lasts, or waits for another that does.

    Args:
        scratch: the trial's scratch folder.
    """
    _note(scratch, _BEGINS)
    try:
        yield
    finally:
        _note(scratch, _ENDS)


def seconds(scratch: Path) -> float:
    """Returns for how long any of a trial's ranks has built something until now; half an hour at most.

    Args:
        scratch: the trial's scratch folder.
    """
    try:
        lines = _file(scratch).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    building: set[str] = set()
    total, since = 0.0, 0.0
    for line in lines:
        # A rank may be about to write the last of them.
        with contextlib.suppress(ValueError):
            who, what, moment = line.split()
            at = float(moment)
            if what == _BEGINS:
                since = since if building else at
                building.add(who)
            elif who in building:
                building.discard(who)
                total += 0.0 if building else max(0.0, at - since)
    return min(total + (max(0.0, time.time() - since) if building else 0.0), _LONGEST_S)


def _note(scratch: Path, what: str) -> None:
    # A disk that is full: the deadline is then what it was.
    with contextlib.suppress(OSError), open_own(_file(scratch), "a", encoding="utf-8") as file:
        file.write(f"{os.uname().nodename}/{os.getpid()} {what} {time.time()}\n")


def _file(scratch: Path) -> Path:
    return scratch / "builds"
