"""The slots of a host: one queue hands them out to the studies of all users."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.locks import USERS_FOLDER, hold_folder, own_folder, release
from zerotune.trial_lib.messages import orders
from zerotune.trial_lib.messages.errors import InputError, plain
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import WaitedForSlots
from zerotune.trial_lib.records.units import duration

# Claims on the slots of a host. Each is a locked file, in a folder of the user's who made it, that all users can
# read.

_CLAIMS = "claims"
_CLAIMS_POLL_S = 0.005
_MOST_OF_A_USER, _MOST_BYTES, _LONGEST_TEXT = 1000, 64 * 1024, 100


@dataclass(frozen=True)
class Claim:
    """What a trial, or a training, wants of a host's slots, or has of them."""

    arrived: int  # nanoseconds since the boot. The order of arrival.
    wants: tuple[str, ...]  # the devices that it can run on, by preference
    count: int  # how many of them it takes
    holds: tuple[str, ...]  # the devices that it has. Empty while it waits.
    since: float  # when it arrived, or got its devices, in seconds since the epoch
    what: str  # names it, such as a trial's id
    pid: int  # of the process that made it
    uid: int = 0  # of the user who owns its file

    @property
    def maker(self) -> str:
        return f"{self.what} of {_name_of(self.uid)} (pid {self.pid})"


_CLAIM = TypeAdapter(Claim)


class OwnClaim:
    """The file of one claim of this process. Call its methods while the caller has `one_at_a_time`'s lock."""

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
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(asdict(claim)).encode(), 0)

    def withdraw(self) -> None:
        """Ends the claim at once, even if other processes have its descriptor. Needs no lock."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK))
        os.close(self.descriptor)


class OthersClaims:
    """The claims of all other processes, in the order of arrival, as they were when this was made.

    The caller has `one_at_a_time`'s lock.
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
        for descriptor, _ in self._files:
            os.close(descriptor)
        self._files.clear()


@contextlib.contextmanager
def one_at_a_time(lock_dir: Path, gives_up: Callable[[float], bool]) -> Iterator[bool]:
    """Yields whether this process alone, of all users', reads and writes claims meanwhile.

    Any user can lock a folder that all can read, and so hold all claims up. That withholds no more than holding all
    slots does.
    """
    own_folder(lock_dir)
    descriptor, began = os.open(lock_dir, os.O_RDONLY | os.O_DIRECTORY), time.monotonic()
    try:
        is_alone = _locks(descriptor)
        while not is_alone and not gives_up(time.monotonic() - began):
            time.sleep(_CLAIMS_POLL_S)
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


def _live(lock_dir: Path) -> Iterator[tuple[int, os.stat_result]]:
    # The open file of each live claim, with its state. Removes this user's dead ones.
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
    # The claim in a file; None if it is none. Another user may have written anything.
    try:
        claim = _CLAIM.validate_json(os.pread(descriptor, _MOST_BYTES, 0))
    except ValueError:
        return None
    return replace(claim, what=" ".join(plain(claim.what).split())[:_LONGEST_TEXT], uid=uid)


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
    # Whether the owner of a file holds it. Locks for reading, which any user can take, do not count.
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_RDLCK))
    return answer[:2] != struct.pack("h", fcntl.F_UNLCK)


# The queue for the slots of a host: who may take which devices now.


@dataclass(frozen=True)
class QueueWait:
    count: int  # the slots that it waits for
    of: int  # the slots that it can run on
    place: int  # its place among the claims that wait for any of these, from 1
    # Who has these slots, each with the time since when, in seconds since the epoch
    holders: tuple[tuple[str, float], ...]


def may_take(claim: Claim, others: Sequence[Claim]) -> tuple[str, ...] | None:
    """Returns the devices that a claim may take now; None if it has to wait. The others are in the order of arrival."""
    held = {device for other in others for device in other.holds}
    ahead = _ahead(claim, others)
    spare = [_spare(waiting, others, held) for waiting in ahead]
    taken: list[str] = []
    for device in claim.wants:
        asking = [place for place, waiting in enumerate(ahead) if device in waiting.wants]
        if device not in held and len(taken) < claim.count and all(spare[place] > 0 for place in asking):
            taken.append(device)
            for place in asking:
                spare[place] -= 1
    return tuple(taken) if len(taken) == claim.count else None


def wait_of(claim: Claim, others: Sequence[Claim]) -> QueueWait:
    wanted = {*claim.wants}
    holders = tuple((other.maker, other.since) for other in others if wanted & {*other.holds})
    return QueueWait(claim.count, len(claim.wants), len(_ahead(claim, others)) + 1, holders)


def _ahead(claim: Claim, others: Sequence[Claim]) -> list[Claim]:
    return [
        other
        for other in others
        if not other.holds
        and (other.arrived, other.pid) < (claim.arrived, claim.pid)
        and not {*claim.wants}.isdisjoint(other.wants)
    ]


def _spare(waiting: Claim, others: Sequence[Claim], held: set[str]) -> int:
    # Returns how many of its free devices a waiting claim can do without, whatever the order in which others end. A
    # claim gives all its devices back at once. So the devices that can be free together are sums, and the least sum
    # that is enough may be more than enough. A claim that waits behind another can do without none.
    if _ahead(waiting, others):
        return 0
    wanted = {*waiting.wants}
    sums = {len(wanted - held)}
    for other in others:
        sums |= {some + len(wanted & {*other.holds}) for some in sums}
    return min((some - waiting.count for some in sums if some >= waiting.count), default=0)


_POLL_S = 0.05
# Seldom, because a poll sees every change that matters, unless two fall into one tick of the file system's clock.
_LOOK_S = 2.0
# All users' claims are read in milliseconds.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class HeldSlots:
    """Slots that no other process on this host holds."""

    names: list[str]  # of the slots
    # Of the claim's locked file, and of the folder, which they protect from cleaners. A process with a copy of them
    # holds the slots as long as it lives, even if the process that took them has died.
    descriptors: tuple[int, ...]


@contextlib.contextmanager
def held_slots(
    lock_dir: Path,
    host: Host,
    count: int,
    is_cancelled: Callable[[], bool],
    tell: Callable[[QueueWait], None] = lambda wait: None,
    preferred: Sequence[str] = (),
    what: str = "a process",
) -> Iterator[HeldSlots | None]:
    """Yields `count` slots that no other process on this host holds meanwhile; None if cancelled while waiting.

    The claims of all users' processes are served in the order of arrival. The kernel ends a claim at once
    when the last of its holders dies.
    Raises InputError: the host has fewer, so that the wait would never end. Or there is no place for the locks.
    """
    if count > len(host.slots):
        raise InputError(
            f"{count} slots are wanted at once, and this host has {len(host.slots)} of kind {host.device}.",
            where="resources.slots_per_trial",
            remedy=f"Ask for at most {len(host.slots)}, or run on a host that has more.",
        )
    # Users of one host may see devices of other kinds. Numbers of cores and of GPUs are different slots.
    slots = {f"{host.device} {host.device_of(slot)}": slot for slot in host.slots}
    in_order = sorted(slots, key=lambda device: host.device_of(slots[device]) not in preferred)
    with contextlib.ExitStack() as held:
        folder = hold_folder(lock_dir)
        held.callback(release, [folder])
        turn = _Turn(lock_dir, tuple(in_order), count, what)
        held.callback(turn.end)
        devices = turn.wait(is_cancelled, tell)
        if devices is None:
            yield None
            return
        # In the host's order, which is the order of the ranks.
        names = [slot for device, slot in slots.items() if device in devices]
        yield HeldSlots(names, (turn.descriptor, folder))


class _Turn:
    """One claim, from its arrival to its end."""

    def __init__(self, lock_dir: Path, wants: tuple[str, ...], count: int, what: str) -> None:
        self._lock_dir = lock_dir
        self._wants, self._count, self._what = wants, count, what
        self._own: OwnClaim | None = None

    @property
    def descriptor(self) -> int:
        assert self._own is not None
        return self._own.descriptor

    def wait(self, is_cancelled: Callable[[], bool], tell: Callable[[QueueWait], None]) -> tuple[str, ...] | None:
        """Returns the claim's devices when its turn has come; None if it was cancelled first."""
        began = time.time()
        told_at = _PATIENCE_S
        claim: Claim | None = None

        def gives_up(seconds: float) -> bool:
            nonlocal told_at
            if seconds >= told_at:
                told_at = seconds + _LOOK_S
                locker = f"a process that keeps {self._lock_dir} locked (/proc/locks has its number)"
                tell(QueueWait(self._count, len(self._wants), 1, ((locker, began),)))
            return is_cancelled()

        while True:
            told_at = _PATIENCE_S
            with one_at_a_time(self._lock_dir, gives_up) as is_alone:
                if not is_alone:
                    return None
                if claim is None:
                    # No clock setting changes the order of times since the boot.
                    arrived = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
                    claim = Claim(arrived, self._wants, self._count, (), began, self._what, os.getpid())
                    self._own = OwnClaim(self._lock_dir, claim)
                assert self._own is not None
                others = OthersClaims(self._lock_dir, self._own)
                devices = may_take(claim, others.claims)
                if devices is not None:
                    self._own.write(replace(claim, holds=devices, since=time.time()))
            try:
                if devices is not None:
                    return devices
                tell(wait_of(claim, others.claims))
                look_at = time.monotonic() + _LOOK_S
                while not others.have_changed() and time.monotonic() < look_at:
                    if is_cancelled():
                        return None
                    time.sleep(_POLL_S)
            finally:
                others.close()

    def end(self) -> None:
        if self._own is not None:
            self._own.withdraw()


# A wait for slots, as it is told: in the log, in the trial's folder while it lasts, and in the trial's result.

# A short wait is told once. Then the words become rare.
_FIRST_WORD_S, _RAREST_S = 30.0, 600.0
_MOST_HOLDERS = 3
_DAY_S = 86400.0


class SlotWait:
    """Tells of one wait for slots, in a note and, while it lasts, in a file of each trial's folder."""

    def __init__(self, label: str, note: Callable[[str], None], folders: Sequence[TrialPaths] = ()) -> None:
        self._label, self._note, self._folders = label, note, folders
        self._first: QueueWait | None = None
        self._since = orders.now()
        self._next_word = 0.0
        self._written = ""
        self.waited: WaitedForSlots | None = None

    def tell(self, wait: QueueWait) -> None:
        if self._first is None:
            self._first, self._since = wait, orders.now()
        waiting = sentence(wait)
        if waiting != self._written:
            for paths in self._folders:
                write_whole(paths.waiting, json.dumps({"waiting": waiting, "since": self._since}))
            self._written = waiting
        if time.monotonic() < self._next_word:
            return
        seconds = orders.seconds_since(self._since)
        so_far = f" It has waited {duration(seconds)}." if seconds >= 1 else ""
        self._note(f"{self._label} waits for {waiting}.{so_far}")
        self._next_word = time.monotonic() + min(max(_FIRST_WORD_S, seconds), _RAREST_S)

    def end(self, has_slots: bool) -> None:
        if self._first is None:
            return
        seconds = orders.seconds_since(self._since)
        holders = [f"{holder} since {_moment(since)}" for holder, since in self._first.holders]
        self.waited = WaitedForSlots(seconds=round(seconds, 3), place=self._first.place, holders=holders)
        for paths in self._folders:
            paths.waiting.unlink(missing_ok=True)
        if has_slots:
            self._note(f"{self._label} has its slots after a wait of {duration(seconds)}")


def sentence(wait: QueueWait) -> str:
    slots = f"{wait.count} of {wait.of} slot{'' if wait.of == 1 else 's'}, place {wait.place} in the queue"
    shown = [f"{holder} since {_moment(since)}" for holder, since in wait.holders[:_MOST_HOLDERS]]
    more = len(wait.holders) - len(shown)
    return f"{slots}. Held by {', '.join(shown)}{f' and {more} more' if more else ''}" if shown else slots


def _moment(since: float) -> str:
    is_today = abs(time.time() - since) < _DAY_S
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", time.localtime(since))
