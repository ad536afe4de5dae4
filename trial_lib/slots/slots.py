"""The slots of a host: one allocator hands them out to all studies."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trial_lib.device.host.base import Host
from trial_lib.slots.lock_files import hold_folder, lock_file, release
from trial_lib.wire.errors import InputError

_POLL_S = 0.05
_WAITING = "waiting.lock"


@dataclass(frozen=True)
class HeldSlots:
    """Slots that no other process on this host holds.

    Attributes:
        names: of the slots.
        descriptors: of their locked files, and of the folder, which they protect from cleaners. A process with a copy
            of them holds the slots as long as it lives, even if the process that took them has died.
    """

    names: list[str]
    descriptors: tuple[int, ...]


@contextlib.contextmanager
def held_slots(
    lock_dir: Path,
    host: Host,
    count: int,
    is_cancelled: Callable[[], bool],
    note: Callable[[str], None] = lambda text: None,
    preferred: Sequence[str] = (),
) -> Iterator[HeldSlots | None]:
    """Yields `count` slots that no other process on this host holds meanwhile; None if cancelled while waiting.

    A slot is a locked file. The kernel frees it at once when the last of its holders dies.

    Args:
        lock_dir: the folder of the locks, the same for all studies on the host.
        host: the host with the slots.
        count: the number of slots, which are given all at once. The first study in the queue gets the slots that come
            free.
        is_cancelled: called while it waits.
        note: called with a sentence if it has to wait.
        preferred: devices that are taken first if they are free.

    Raises:
        InputError: the host has fewer, so that the wait would never end.
    """
    if count > len(host.slots):
        raise InputError(
            f"{count} slots are wanted at once, and this host has {len(host.slots)} of kind {host.device}.",
            where="resources.slots_per_trial",
            remedy=f"Ask for at most {len(host.slots)}, or run on a host that has more.",
        )
    folder = hold_folder(lock_dir)
    taking = _Taking(lock_dir, host, count, preferred)
    try:
        has_all = taking.take()
        if not has_all:
            note(f"waiting for {count} of this host's {len(host.slots)} slots, which other studies hold")
        while not has_all:
            if is_cancelled():
                taking.give_back()
                yield None
                return
            time.sleep(_POLL_S)
            has_all = taking.take()
        # In the host's order, which is the order of the ranks.
        names = [slot for slot in host.slots if slot in taking.held]
        yield HeldSlots(names, (*(taking.held[name] for name in names), folder))
    finally:
        taking.give_back()
        release([folder])


class _Taking:
    """Takes slots: all at once, or one after another for the first in the queue.

    Only the first in the queue, which holds the lock `waiting.lock`, keeps the slots that it has got so far. So no two
    studies can wait for each other. The file names the slots that it waits for, and no other study takes these.
    Otherwise a trial with many slots would get none beside small ones that come and go.

    Args:
        lock_dir: see `held_slots`.
        host: see `held_slots`.
        count: see `held_slots`.
        preferred: see `held_slots`.

    Attributes:
        held: the descriptor of each slot's locked file.
    """

    def __init__(self, lock_dir: Path, host: Host, count: int, preferred: Sequence[str]) -> None:
        self._lock_dir = lock_dir
        in_order = sorted(host.slots, key=lambda slot: host.device_of(slot) not in preferred)
        self._files = {slot: f"slot-{host.device_of(slot).replace('/', '-')}.lock" for slot in in_order}
        self._count = count
        self._waiting: int | None = None
        self.held: dict[str, int] = {}

    def take(self) -> bool:
        """Takes free slots. Returns whether all of them are held now."""
        # One study at a time. Two that each take half would both fail for ever.
        allocator = lock_file(self._lock_dir / "slots.lock", fcntl.LOCK_EX)
        try:
            waited_for = self._waited_for_by_another()
            for slot, file in self._files.items():
                if slot not in self.held and file not in waited_for:
                    with contextlib.suppress(BlockingIOError):
                        self.held[slot] = lock_file(self._lock_dir / file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if len(self.held) == self._count:
                    self._stop_waiting()
                    return True
            if not self._is_first_to_wait():
                self.give_back()
            return False
        finally:
            release([allocator])

    def _waited_for_by_another(self) -> set[str]:
        """Returns the lock files of the slots that are reserved for another, which is first in the queue."""
        if self._waiting is not None:
            return set()
        path = self._lock_dir / _WAITING
        try:
            release([lock_file(path, fcntl.LOCK_SH | fcntl.LOCK_NB)])
        except BlockingIOError:
            return set(path.read_text().splitlines())
        return set()

    def _is_first_to_wait(self) -> bool:
        if self._waiting is None:
            path = self._lock_dir / _WAITING
            with contextlib.suppress(BlockingIOError):
                self._waiting = lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.write_text("\n".join(self._files.values()))
        return self._waiting is not None

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            release([self._waiting])
            self._waiting = None

    def give_back(self) -> None:
        """Releases everything at once."""
        # Closing alone is not enough, because a guard that is about to end has them too.
        release(self.held.values())
        self.held.clear()
        self._stop_waiting()
