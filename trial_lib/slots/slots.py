"""The slots of a host: one queue hands them out to the studies of all users."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trial_lib.device.host.base import Host
from trial_lib.slots.claims import Claim, OthersClaims, OwnClaim, now_since_boot, one_at_a_time
from trial_lib.slots.lock_files import hold_folder, release
from trial_lib.slots.queue import QueueWait, may_take, wait_of
from trial_lib.wire.errors import InputError

_POLL_S = 0.05
# Seldom, because a poll sees every change that matters, unless two fall into one tick of the file system's clock.
_LOOK_S = 2.0
# All users' claims are read in milliseconds.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class HeldSlots:
    """Slots that no other process on this host holds.

    Attributes:
        names: of the slots.
        descriptors: of the claim's locked file, and of the folder, which they protect from cleaners. A process with a
            copy of them holds the slots as long as it lives, even if the process that took them has died.
    """

    names: list[str]
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

    The claims of all users' processes are served in the order of arrival (`queue.py`). The kernel ends a claim at once
    when the last of its holders dies.

    Args:
        lock_dir: the folder of the locks, the same for all users and studies on the host.
        host: the host with the slots.
        count: the number of slots, which are given all at once.
        is_cancelled: called while it waits.
        tell: called every few seconds while it has to wait.
        preferred: devices that are taken first if they are free.
        what: names the claim for those that wait for it.

    Raises:
        InputError: the host has fewer, so that the wait would never end. Or there is no place for the locks.
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
                    claim = Claim(now_since_boot(), self._wants, self._count, (), began, self._what, os.getpid())
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
        """Gives everything back at once."""
        if self._own is not None:
            self._own.withdraw()
