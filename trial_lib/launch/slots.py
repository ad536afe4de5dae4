"""Slots are handed out by one allocator for all studies on a host."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trial_lib.launch.hardware import Host
from trial_lib.launch.lock_files import hold_folder, lock_file, release

_POLL_S = 0.05


@dataclass(frozen=True)
class HeldSlots:
    """Slots that nobody else on this host holds.

    Attributes:
        names: of the slots.
        descriptors: of their locked files and of the folder, which is kept from cleaners. A process that has got them
            too holds the slots as long as it lives, even when the one that took them has died.
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
    folder = hold_folder(lock_dir)
    held = None
    try:
        held = _take(lock_dir, host, count)
        if held is None:
            note(f"waiting for {count} of this host's {len(host.slots)} slots, which other studies hold")
        while held is None:
            if is_cancelled():
                yield None
                return
            time.sleep(_POLL_S)
            held = _take(lock_dir, host, count)
        yield HeldSlots(list(held), (*held.values(), folder))
    finally:
        # Not by closing alone: a guard that is still about to end has them too.
        release([*(held or {}).values(), folder])


def _take(lock_dir: Path, host: Host, count: int) -> dict[str, int] | None:
    """Returns the slots taken: all that were wanted or none, so that two trials cannot wait for each other's."""
    held: dict[str, int] = {}
    # One at a time: two that each take half would both fail for ever.
    allocator = lock_file(lock_dir / "slots.lock", fcntl.LOCK_EX)
    try:
        for slot in host.slots:
            path = lock_dir / f"slot-{host.device_of(slot).replace('/', '-')}.lock"
            with contextlib.suppress(BlockingIOError):
                held[slot] = lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if len(held) == count:
                return held
        release(held.values())
        return None
    except BaseException:
        release(held.values())
        raise
    finally:
        release([allocator])
