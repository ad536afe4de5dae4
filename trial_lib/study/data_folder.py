"""ZeroTune's own folder: Prefect's database, the files of `zerotune up`, and operators without another place."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from trial_lib.messages.errors import InputError
from trial_lib.messages.files import OWNERS_FOLDER, make_own_folder
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.units import bytes_shown

_REMEDY = "Mend its permissions, or name another one by XDG_DATA_HOME."


def data_folder() -> Path:
    """Returns the folder, which may not exist yet. Its path is relative if there is no home folder."""
    try:
        return platformdirs.user_data_path("zerotune")
    except RuntimeError:
        return Path("~/.local/share/zerotune")


def require_data_folder(name: str) -> None:
    """Checks that a folder in it can be made and written. It leaves nothing.

    Args:
        name: of the folder.

    Raises:
        InputError: it cannot.
    """
    folder = _in_data_folder(name)
    if not can_be_written(folder):
        nearest = _nearest(folder)
        why = "." if nearest.is_dir() else " (it is no folder)."
        raise InputError(f"it cannot be written{why}", where=str(nearest), remedy=_REMEDY)
    nearest = _nearest(folder)
    try:
        # Permissions do not show all. A kernel's own folder, or a host's that trusts no root, refuses what they allow.
        Path(tempfile.mkdtemp(dir=nearest, prefix=".zerotune-")).rmdir()
    except OSError as error:
        raise InputError(f"it cannot be written ({error.strerror}).", where=str(nearest), remedy=_REMEDY) from None


def can_be_written(folder: Path) -> bool:
    """Returns whether a folder can be written, or made."""
    nearest = _nearest(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def _in_data_folder(name: str) -> Path:
    folder = data_folder() / name
    if not folder.is_absolute():
        raise InputError(
            "there is no home folder: the variable is not set, and this user is not in the password database.",
            where="HOME",
            remedy="Set it, or XDG_DATA_HOME, to a folder that you may write to.",
        )
    return folder


def made_in_data_folder(name: str) -> Path:
    """Returns a folder in it, which only its owner may enter, and makes it if it does not exist.

    Args:
        name: of the folder.

    Raises:
        InputError: it cannot be made or written.
    """
    folder = _in_data_folder(name)
    try:
        make_own_folder(folder)
        # Earlier versions made it readable for all users. A lock that another user can open can be held by them.
        folder.chmod(OWNERS_FOLDER)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"it cannot be written ({error.strerror}).", where=str(folder), remedy=_REMEDY) from None
    return folder


# A study's folder that cannot be written any more. The study stops before it loses anything, and says so.


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
