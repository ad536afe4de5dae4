"""Lock files in a folder under /tmp. Cleaners remove files there by their age, locked or not."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from trial_lib.slots.lock_dir import own_folder


def hold_folder(lock_dir: Path) -> int:
    """Returns a descriptor that keeps `systemd-tmpfiles` out of this user's folder while it is open in any process.

    systemd-tmpfiles skips a directory that is flock'ed, including everything below it. If you delete a claim's file by
    hand, its slots can be given out twice.

    Args:
        lock_dir: the folder that all users share. This user's folder in it is made if it does not exist.

    Raises:
        InputError: it cannot be made.
    """
    while True:
        descriptor = _locked(own_folder(lock_dir), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, fcntl.LOCK_SH)
        if descriptor is not None:
            return descriptor


def lock_file(path: Path, operation: int) -> int:
    """Returns the descriptor of a locked file, which is made if it does not exist.

    Args:
        path: of the file.
        operation: as for `fcntl.flock`.

    Raises:
        BlockingIOError: another process has its lock, and the operation does not wait.
    """
    while True:
        descriptor = _locked(path, os.O_RDWR | os.O_CREAT, operation)
        if descriptor is not None:
            return descriptor


def _locked(path: Path, flags: int, operation: int) -> int | None:
    """Returns the locked descriptor of a path's file; None if the file was removed before it was locked."""
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
            # Neither opening nor locking changes a file's age.
            os.utime(descriptor)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _stands_at(descriptor: int, path: Path) -> bool:
    """Returns whether an open file is still the file of that path, which others lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def release(descriptors: Iterable[int]) -> None:
    """Releases locks at once and closes their descriptors, even if another process has these as well."""
    for descriptor in descriptors:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
