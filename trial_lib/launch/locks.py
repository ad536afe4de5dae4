"""Locks of slots and ports, in a folder that all users of the host share."""

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from zerotune.trial_lib.messages.errors import InputError

# The folder of the locks of slots and ports, and each user's folder in it.

USERS_FOLDER = "zerotune-"
"""Each user's folder begins with this. Its owner is the user, whatever follows."""
# Others find the claims in it by their names. They cannot list it, nor lock it.
_MODE = 0o711


def host_lock_dir() -> Path:
    """The folder that all users of this host share. It lasts for this boot, as slots and ports do.

    It is the system's own, so no user can close it to the others, or remove their files.
    """
    return Path("/tmp")


def own_folder(lock_dir: Path) -> Path:
    """Returns this user's folder, which nobody else may write to. It is made if it does not exist.

    If another user has laid something in its place, this user gets a folder of another name.
    Raises InputError: it cannot be made.
    """
    try:
        lock_dir.mkdir(parents=True, exist_ok=True)
        name = f"{USERS_FOLDER}{os.getuid()}"
        usual = lock_dir / name
        with contextlib.suppress(FileExistsError):
            usual.mkdir(mode=_MODE)
        folder = usual if _is_own(usual) else next(filter(_is_own, sorted(lock_dir.glob(f"{name}.*"))), None)
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=lock_dir))
        if stat.S_IMODE(folder.stat().st_mode) != _MODE:
            folder.chmod(_MODE)
    except OSError as error:
        raise InputError(
            f"the locks of slots and ports cannot be kept there ({error.strerror}).",
            where=str(lock_dir),
            remedy="Let every user of this host write to it (chmod 1777).",
        ) from None
    return folder


def _is_own(folder: Path) -> bool:
    there = folder.lstat()
    return stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid()


# Lock files in a folder under /tmp. Cleaners remove files there by their age, locked or not.


def hold_folder(lock_dir: Path) -> int:
    """Returns a descriptor that keeps `systemd-tmpfiles` out of this user's folder while it is open in any process.

    systemd-tmpfiles skips a directory that is flock'ed, including everything below it. If you delete a claim's file by
    hand, its slots can be given out twice.
    Raises InputError: it cannot be made.
    """
    while True:
        descriptor = _locked(own_folder(lock_dir), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, fcntl.LOCK_SH)
        if descriptor is not None:
            return descriptor


def lock_file(path: Path, operation: int) -> int:
    """Returns the descriptor of a locked file, which is made if it does not exist.
    Raises BlockingIOError: another process has its lock, and the operation does not wait.
    """
    while True:
        descriptor = _locked(path, os.O_RDWR | os.O_CREAT, operation)
        if descriptor is not None:
            return descriptor


def _locked(path: Path, flags: int, operation: int) -> int | None:
    # The locked descriptor of a path's file; None if the file was removed before it was locked.
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
    # Whether an open file is still the file of that path, which others lock.
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def release(descriptors: Iterable[int]) -> None:
    """Releases locks at once and closes their descriptors, even if another process has these as well."""
    for descriptor in descriptors:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


# Ports for trials that run at the same time on one host.

# Below the kernel's range for outgoing connections (32768 and up).
_PORTS = range(21000, 31000)
# A name that one socket at a time can have, of any user in this network namespace. The kernel frees it with the socket.
_NAME = "\0zerotune-port-{}"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a free port that no other trial of any user on this host gets meanwhile."""
    first = secrets.randbelow(len(_PORTS))
    for port in (*_PORTS[first:], *_PORTS[:first]):
        with socket.socket(socket.AF_UNIX) as name:
            if _binds(name, _NAME.format(port)) and _is_free(port):
                yield port
                return
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _binds(name: socket.socket, address: str) -> bool:
    with contextlib.suppress(OSError):
        name.bind(address)
        return True
    return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
