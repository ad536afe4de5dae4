"""A full disk. The study stops before it loses anything, says so, and can be resumed when there is room.

A trial that failed for lack of room says nothing about its configuration. It is not recorded, and runs again.
"""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.units import bytes_shown

# With this reserve, the study's records and the lines of its history always find room.
_RESERVE = 32 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(Exception):
    """There is no room for a study's files."""

    def __init__(self, root: Path) -> None:
        free = shutil.disk_usage(root).free
        super().__init__(
            f"The disk is full: {bytes_shown(free)} are free for {root}, or its quota is used up. Nothing is lost. "
            f"Free at least {bytes_shown(_RESERVE)}, then resume with: zerotune resume {root}"
        )


def check_room(root: Path) -> None:
    """Checks that there is room for a trial's files.

    Args:
        root: the study's folder.

    Raises:
        DiskFullError: there is too little.
    """
    if shutil.disk_usage(root).free < _RESERVE:
        raise DiskFullError(root)


def check_end(root: Path, result: TrialResult) -> None:
    """Checks whether a trial may have failed for lack of room.

    A trial that has filled the disk by itself, and has left room again, failed like any other. Its reason says why.

    Args:
        root: the study's folder.
        result: the trial's.

    Raises:
        DiskFullError: it may have.
    """
    if result.outcome is Outcome.CRASHED:
        check_room(root)


@contextlib.contextmanager
def disk_full_told(root: Path) -> Iterator[None]:
    """Raises DiskFullError if the disk has no room for a write of the body.

    Args:
        root: the study's folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(root) from error
        raise
