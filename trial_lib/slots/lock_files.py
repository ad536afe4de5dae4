"""Lock files in a folder under /tmp, which cleaners go through: they remove files by their age, locked or not."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from trial_lib.slots.own_folder import own_folder


def hold_folder(folder: Path) -> int:
    """Returns a descriptor that keeps `systemd-tmpfiles` out of a folder as long as it is open somewhere.

    That asks for the folder's lock, and where it is held leaves out all that is below. Nothing keeps out somebody who
    removes a held file by force: the next to ask makes another file of that name, and is given what that stands for.

    Args:
        folder: made for this user alone, where it is not there yet.

    Raises:
        InputError: it is not this user's.
    """
    while True:
        own_folder(folder)
        descriptor = _locked(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, fcntl.LOCK_SH)
        if descriptor is not None:
            return descriptor


def lock_file(path: Path, operation: int) -> int:
    """Returns the descriptor of a file that is locked, made where it is not there yet.

    Args:
        path: of the file.
        operation: as `fcntl.flock` takes it.

    Raises:
        BlockingIOError: another has its lock, and the operation is not to wait.
    """
    while True:
        descriptor = _locked(path, os.O_RDWR | os.O_CREAT, operation)
        if descriptor is not None:
            return descriptor


def _locked(path: Path, flags: int, operation: int) -> int | None:
    """Returns the locked descriptor of what stands at a path; None if that was removed before it was locked."""
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            # The folder itself is gone.
            raise
        return None
    try:
        fcntl.flock(descriptor, operation)
        if _stands_at(descriptor, path):
            # Neither opening nor locking makes a file younger.
            os.utime(descriptor)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _stands_at(descriptor: int, path: Path) -> bool:
    """Returns whether an open file is still the one of that path, which others lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def release(descriptors: Iterable[int]) -> None:
    """Gives locks back at once, though another process may have the descriptors too, and closes them."""
    for descriptor in descriptors:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
