"""Slots are handed out by one allocator for all studies on a host."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trial_lib.launch.hardware import Host
from trial_lib.launch.own_folder import own_folder

_POLL_S = 0.05


@dataclass(frozen=True)
class HeldSlots:
    """Slots that nobody else on this host holds.

    Attributes:
        names: of the slots.
        descriptors: of their locked files. A process that has got them too holds the slots as long as it lives, even
            when the one that took them has died.
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
) -> Iterator[HeldSlots | None]:
    """Yields `count` slots that nobody else on this host holds meanwhile; None if cancelled while waiting.

    A slot is a locked file: the kernel gives it back at once when the last of its holders dies.

    Args:
        lock_dir: where the locks stand, the same for all studies on the host.
        host: whose slots there are to choose from, at least `count`.
        count: slots wanted, all at once.
        is_cancelled: asked while waiting.
        note: told when there is something to wait for.
    """
    own_folder(lock_dir)
    held = _take(lock_dir, host, count)
    if held is None:
        note(f"waiting for {count} of this host's {len(host.slots)} slots, which other studies hold")
    while held is None:
        if is_cancelled():
            yield None
            return
        time.sleep(_POLL_S)
        held = _take(lock_dir, host, count)
    try:
        yield held
    finally:
        # Not by closing alone: a guard that is still about to end has them too.
        for descriptor in held.descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        _close(held.descriptors)


def _take(lock_dir: Path, host: Host, count: int) -> HeldSlots | None:
    """Returns the slots taken: all that were wanted or none, so that two trials cannot wait for each other's."""
    held: dict[str, int] = {}
    # One at a time: two that each take half would both fail for ever.
    allocator = _open(lock_dir / "slots.lock")
    try:
        fcntl.flock(allocator, fcntl.LOCK_EX)
        for slot in host.slots:
            descriptor = _open(lock_dir / f"slot-{host.device_of(slot).replace('/', '-')}.lock")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            held[slot] = descriptor
            if len(held) == count:
                return HeldSlots(list(held), tuple(held.values()))
        _close(held.values())
        return None
    except BaseException:
        _close(held.values())
        raise
    finally:
        os.close(allocator)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
