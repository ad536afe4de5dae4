"""A full disk: a study stops before it loses anything, says so, and can be resumed once there is room.

A trial that fails for want of room has said nothing about its configuration: it is not told, and runs again.
"""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.units import bytes_shown

# So that the records of how a study ended, and the lines of its history, always find room.
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
    """Looks for room for a trial's files.

    Args:
        root: the study's folder.

    Raises:
        DiskFullError: there is too little.
    """
    if shutil.disk_usage(root).free < _RESERVE:
        raise DiskFullError(root)


def check_end(root: Path, result: TrialResult) -> None:
    """Looks at whether a trial may have failed for want of room.

    One that has filled the disk by itself, and has left room again, has failed like any other: its reason says why.

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
    """Raises DiskFullError for whatever the disk has no room for inside.

    Args:
        root: the study's folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(root) from error
        raise
