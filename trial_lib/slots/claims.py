"""Claims on the slots of a host. Each is a locked file, in a folder of the user's who made it, that all users can read.

Only its maker can lock such a file for writing, so a user cannot keep another's claim alive. The kernel removes the
lock when the last process that has the file open has died. No process writes to another user's files.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import pwd
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trial_lib.slots.lock_dir import USERS_FOLDER, own_folder
from trial_lib.wire.plain_text import plain

_CLAIMS = "claims"
_POLL_S = 0.005
_MOST_OF_A_USER, _MOST_BYTES, _LONGEST_TEXT = 1000, 64 * 1024, 100


@dataclass(frozen=True)
class Claim:
    """What a trial, or a training, wants of a host's slots, or has of them.

    Attributes:
        arrived: nanoseconds since the boot. The order of arrival.
        wants: the devices that it can run on, by preference.
        count: how many of them it takes.
        holds: the devices that it has. Empty while it waits.
        since: when it arrived, or got its devices, in seconds since the epoch.
        what: names it, such as a trial's id.
        pid: of the process that made it.
        uid: of the user who owns its file.
    """

    arrived: int
    wants: tuple[str, ...]
    count: int
    holds: tuple[str, ...]
    since: float
    what: str
    pid: int
    uid: int = 0

    @property
    def maker(self) -> str:
        """Its name, user and process."""
        return f"{self.what} of {_name_of(self.uid)} (pid {self.pid})"


class OwnClaim:
    """The file of one claim of this process. Call its methods while the caller has `one_at_a_time`'s lock.

    Args:
        lock_dir: the folder that all users share.
        claim: its first content.
    """

    def __init__(self, lock_dir: Path, claim: Claim) -> None:
        folder = own_folder(lock_dir) / _CLAIMS
        folder.mkdir(mode=0o755, exist_ok=True)
        folder.chmod(0o755)
        self._path = folder / f"{claim.arrived}-{claim.pid}"
        # No other user may open it before it is locked.
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK))
        self.write(claim)
        os.fchmod(self.descriptor, 0o644)

    def write(self, claim: Claim) -> None:
        """Replaces its content."""
        text = json.dumps(asdict(claim)).encode()
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text, 0)

    def withdraw(self) -> None:
        """Ends the claim at once, even if other processes have its descriptor. Needs no lock."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK))
        os.close(self.descriptor)


class OthersClaims:
    """The claims of all other processes, as they were when this was made.

    Args:
        lock_dir: the folder that all users share. The caller has `one_at_a_time`'s lock.
        own: the file to leave out.

    Attributes:
        claims: in the order of arrival.
    """

    def __init__(self, lock_dir: Path, own: OwnClaim) -> None:
        found = []
        self._files: list[tuple[int, int]] = []
        own_inode = os.fstat(own.descriptor)
        for descriptor, there in _live(lock_dir):
            claim = None if os.path.samestat(there, own_inode) else _read(descriptor, there.st_uid)
            if claim is None:
                os.close(descriptor)
            else:
                found.append(claim)
                self._files.append((descriptor, there.st_mtime_ns))
        self.claims = sorted(found, key=lambda claim: (claim.arrived, claim.pid))

    def have_changed(self) -> bool:
        """Returns whether one of them has ended, or has got its devices."""
        return any(
            not _is_locked(descriptor) or os.fstat(descriptor).st_mtime_ns != written
            for descriptor, written in self._files
        )

    def close(self) -> None:
        """Closes their files."""
        for descriptor, _ in self._files:
            os.close(descriptor)
        self._files.clear()


@contextlib.contextmanager
def one_at_a_time(lock_dir: Path, gives_up: Callable[[float], bool]) -> Iterator[bool]:
    """Yields whether this process alone, of all users', reads and writes claims meanwhile.

    Any user can lock a folder that all can read, and so hold all claims up. That withholds no more than holding all
    slots does.

    Args:
        lock_dir: the folder that all users share.
        gives_up: called while another process does so, with the seconds so far. Returns whether to wait no longer.
    """
    own_folder(lock_dir)
    descriptor, began = os.open(lock_dir, os.O_RDONLY | os.O_DIRECTORY), time.monotonic()
    try:
        is_alone = _locks(descriptor)
        while not is_alone and not gives_up(time.monotonic() - began):
            time.sleep(_POLL_S)
            is_alone = _locks(descriptor)
        yield is_alone
    finally:
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def now_since_boot() -> int:
    """Nanoseconds since the boot. No clock setting changes their order."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _live(lock_dir: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Yields the open file of each live claim, with its state. Removes this user's dead ones."""
    with os.scandir(lock_dir) as entries:
        folders = [entry.name for entry in entries if entry.name.startswith(USERS_FOLDER)]
    for folder in sorted(folders):
        # Another user's links, pipes and folders there are passed over.
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            users = os.open(lock_dir / folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, users)
            owner = os.fstat(users).st_uid
            claims = os.open(_CLAIMS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=users)
            opened.callback(os.close, claims)
            with os.scandir(claims) as entries:
                names = [entry.name for entry in itertools.islice(entries, _MOST_OF_A_USER)]
            for name in names:
                with contextlib.suppress(OSError):
                    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=claims)
                    there = os.fstat(descriptor)
                    if stat.S_ISREG(there.st_mode) and there.st_uid == owner and _is_locked(descriptor):
                        yield descriptor, there
                        continue
                    os.close(descriptor)
                    if owner == os.getuid():
                        os.unlink(name, dir_fd=claims)


def _read(descriptor: int, uid: int) -> Claim | None:
    """Returns the claim in a file; None if it is none. Another user may have written anything."""
    try:
        text = os.pread(descriptor, _MOST_BYTES, 0)
        claim = Claim(**json.loads(text))
        return Claim(
            arrived=int(claim.arrived),
            wants=tuple(map(str, claim.wants)),
            count=int(claim.count),
            holds=tuple(map(str, claim.holds)),
            since=float(claim.since),
            what=" ".join(plain(str(claim.what)).split())[:_LONGEST_TEXT],
            pid=int(claim.pid),
            uid=uid,
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


@functools.cache
def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _lock(kind: int) -> bytes:
    # struct flock. The lock belongs to the open file and not to the process, so threads exclude each other too.
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _is_locked(descriptor: int) -> bool:
    """Returns whether the owner of a file holds it. Locks for reading, which any user can take, do not count."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_RDLCK))
    return answer[:2] != struct.pack("h", fcntl.F_UNLCK)
