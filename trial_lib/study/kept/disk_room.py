"""A study's folder that cannot be written any more. The study stops before it loses anything, and says so.

The disk is full or read-only, or the folder was moved or removed. A trial that failed for that says nothing about its
configuration. It is not recorded, and runs again when the study is resumed.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.units import bytes_shown

# With this reserve, the study's records and the lines of its history always find room.
_RESERVE = 32 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FolderError(Exception):
    """A study's files cannot be written. The message says why, and what to do."""


def number_of(root: Path) -> int:
    """Returns the number by which a folder is recognised; 0 if it is not there."""
    try:
        return root.stat().st_ino
    except OSError:
        return 0


def check_folder(root: Path, number: int | None = None) -> None:
    """Checks that a study's folder is in its place, and may be written.

    Args:
        root: the folder.
        number: that of the study's folder, because a write may have made another in its place. None if any will do.

    Raises:
        FolderError: it is not.
    """
    there = number_of(root)
    if there == 0 or number not in (None, there):
        raise FolderError(
            f"The study's folder {root} was moved or removed while the study ran, so the study has ended. If you have "
            "moved it, resume with: zerotune resume followed by its new place. If it is gone, start a new study."
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise FolderError(
            f"The study's folder {root} can no longer be written: its disk or its permissions have become read-only. "
            f"Nothing is lost. Make it writable, then resume with: zerotune resume {root}"
        )


def check_room(root: Path) -> None:
    """Checks that there is a place, with room, for a trial's files.

    Args:
        root: the study's folder.

    Raises:
        FolderError: there is none.
    """
    check_folder(root)
    if shutil.disk_usage(root).free < _RESERVE:
        raise _full(root)


def check_end(root: Path, result: TrialResult) -> None:
    """Checks whether a trial may have failed for lack of room, or of its folder.

    A trial that has filled the disk by itself, and has left room again, failed like any other. Its reason says why.

    Args:
        root: the study's folder.
        result: the trial's.

    Raises:
        FolderError: it may have.
    """
    if result.outcome is Outcome.CRASHED:
        check_room(root)


@contextlib.contextmanager
def folder_error_told(root: Path) -> Iterator[None]:
    """Raises FolderError if the body could not write because of the study's folder, or of its disk.

    Args:
        root: the study's folder.
    """
    try:
        yield
    except OSError as error:
        check_folder(root)
        if error.errno in _FULL:
            raise _full(root) from error
        raise


def _full(root: Path) -> FolderError:
    free = shutil.disk_usage(root).free
    return FolderError(
        f"The disk is full: {bytes_shown(free)} are free for {root}, or its quota is used up. Nothing is lost. "
        f"Free at least {bytes_shown(_RESERVE)}, then resume with: zerotune resume {root}"
    )
