"""Slots are handed out by one allocator for all studies on a host."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

_POLL_S = 0.05


@contextlib.contextmanager
def held_slots(
    lock_dir: Path,
    slots: list[str],
    count: int,
    is_cancelled: Callable[[], bool],
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[list[str] | None]:
    """Yields `count` slots that nobody else on this host holds meanwhile; None if cancelled while waiting.

    A slot is a locked file: the kernel gives it back at once when its holder dies.

    Args:
        lock_dir: where the locks stand, the same for all studies on the host.
        slots: names of the slots to choose from, at least `count`.
        count: slots wanted, all at once.
        is_cancelled: asked while waiting.
        note: told when there is something to wait for.
    """
    lock_dir.mkdir(parents=True, exist_ok=True)
    locks = {slot: FileLock(lock_dir / f"slot-{slot.replace('/', '-')}.lock", thread_local=False) for slot in slots}
    held = _take(lock_dir, locks, count)
    if held is None:
        note(f"waiting for {count} of this host's {len(slots)} slots, which other studies hold")
    while held is None:
        if is_cancelled():
            yield None
            return
        time.sleep(_POLL_S)
        held = _take(lock_dir, locks, count)
    try:
        yield held
    finally:
        for slot in held:
            locks[slot].release()


def _take(lock_dir: Path, locks: dict[str, FileLock], count: int) -> list[str] | None:
    """Returns the slots taken: all that were wanted or none, so that two trials cannot wait for each other's."""
    # One at a time: two that each take half would both fail for ever.
    with FileLock(lock_dir / "slots.lock"):
        held: list[str] = []
        for slot, lock in locks.items():
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            held.append(slot)
            if len(held) == count:
                return held
        for slot in held:
            locks[slot].release()
    return None
