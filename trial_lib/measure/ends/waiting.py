"""Notices ranks that wait for each other forever. A thread in each rank looks once a second at the rank's state.

A rank waits if its thread is in a collective, a rendezvous or a store and nothing of the process moves. A rank that
prepares data, builds an op or reads a checkpoint is active, however long the others wait for it. Only if every rank
waits, or has ended, can no rank end the wait.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from trial_lib.device.rank.base import Device
from trial_lib.measure.ends.closing import Closing
from trial_lib.measure.ends.endings import WAITS, WORKS, RankEnd, are_uneven
from trial_lib.measure.ends.stacks import Doing, Stack, doing, place_of, stack_of

_TICK_S = 1.0
# A process that is awake for less than that only checks its threads.
_IDLE_SHARE = 0.05
_MOST_BYTES, _MOST_SLEEPS = 2**20, 3
# If one of the ranks has ended, or has had other batches, less time is enough.
_SURE_SHARE = 1 / 3


class Watcher(threading.Thread):
    """Looks at one thread of this process, and ends a wait forever.

    It writes the rank's state when the thread stands still.

    Args:
        find: returns the closing of the current size.
        model_dir: the folder of the user's code.
        patience_s: seconds without activity, on every rank.
    """

    def __init__(self, find: Callable[[], Closing], model_dir: Path, patience_s: float) -> None:
        super().__init__(daemon=True, name="zerotune-waiting")
        self._find = find
        self._model_dir = model_dir
        self._patience_s = patience_s
        self._fed: object = None
        self._fed_at = self._moved_at = time.monotonic()
        self._place: object = None
        self._times_sure = 0
        self._said: RankEnd | None = None
        self._activity = Activity()

    def run(self) -> None:
        """Looks until the process ends."""
        while True:
            time.sleep(_TICK_S)
            closing = self._find()
            stack = stack_of(closing.probe.thread.ident or 0)
            if not closing.is_closed and stack:
                self._look(closing, stack)

    def _look(self, closing: Closing, stack: Stack) -> None:
        now, fed = time.monotonic(), (closing.probe, closing.probe.micro_batches)
        if fed != self._fed:
            self._fed, self._fed_at, self._place = fed, now, None
        if self._place != place_of(stack) or self._moves(closing, now):
            self._place, self._moved_at, self._times_sure = place_of(stack), now, 0
        short = self._patience_s * _SURE_SHARE
        if now - self._fed_at < short:
            self._say(closing, None)
            return
        does = doing(stack, self._model_dir, _is_busy(closing)) if now - self._moved_at >= short else None
        if does is not None and does.waits_in:
            self._say(closing, closing.end(WAITS, does))
            self._decide(closing, does, now - self._moved_at)
        elif now - self._fed_at >= self._patience_s:
            self._say(closing, closing.end(WORKS, does or doing(stack, self._model_dir)))

    def _moves(self, closing: Closing, now: float) -> bool:
        """Returns whether another part of the process is active.

        The call costs milliseconds. It is made only just before its result matters, so that a long step does not pay
        for it.
        """
        soon = self._patience_s * _SURE_SHARE - 2 * _TICK_S
        if now - self._moved_at <= max(soon, _TICK_S):
            return False
        return self._activity.was(closing.probe.thread, closing.probe.device)

    def _decide(self, closing: Closing, does: Doing, still_s: float) -> None:
        said = closing.meeting.said()
        ends = [RankEnd(**state["end"]) for state in said if state is not None]
        if len(ends) < len(said) or any(end.kind == WORKS for end in ends):
            self._times_sure = 0
            return
        if are_uneven(ends) or still_s >= self._patience_s:
            self._times_sure += 1
        if self._times_sure > 1:
            closing.waits(does)

    def _say(self, closing: Closing, end: RankEnd | None) -> None:
        if end != self._said:
            closing.say(end)
            self._said = end


class Activity:
    """The activity of this process apart from one thread: other threads, child processes, and the disk."""

    def __init__(self) -> None:
        """Starts without a look."""
        self._process = psutil.Process()
        self._before = (0.0, 0.0, 0)
        self._at = 0.0

    def was(self, thread: threading.Thread, device: Device | None) -> bool:
        """Returns whether there was activity since the last call, which must be recent.

        Args:
            thread: the one that does not move.
            device: that it may wait for.
        """
        before, at = self._before, self._at
        self._before, self._at = (self._seconds(thread, device), self._bytes(), _sleeps(thread)), time.monotonic()
        seconds, moved, sleeps = (abs(now - then) for now, then in zip(self._before, before, strict=True))
        if self._at - at > 2 * _TICK_S:
            return False
        return seconds > _IDLE_SHARE * (self._at - at) or moved > _MOST_BYTES or sleeps > _MOST_SLEEPS

    def _seconds(self, thread: threading.Thread, device: Device | None) -> float:
        # A thread may spin while it waits for a device. Its own time then shows nothing.
        spins = device is not None and device.is_apart and thread.ident is not None
        own = time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) if spins else 0.0
        return time.process_time() - own + sum(self._of_children(lambda child: sum(child.cpu_times()[:2])))

    def _bytes(self) -> float:
        return _bytes_of(self._process) + sum(self._of_children(_bytes_of))

    def _of_children(self, figure: Callable[[psutil.Process], float]) -> Iterator[float]:
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                yield figure(child)


def _bytes_of(process: psutil.Process) -> float:
    # Not every kernel counts them.
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        io = process.io_counters()
        return float(io.read_bytes + io.write_bytes)
    return 0.0


def _sleeps(thread: threading.Thread) -> int:
    """Returns how often a thread has gone to sleep. A blocked thread does not do so again and again."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/task/{thread.native_id}/status").read_text(errors="replace").splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                return int(line.split()[1])
    return 0


def _is_busy(closing: Closing) -> bool:
    """Returns whether the device still has work from this rank."""
    device = closing.probe.device
    return device is not None and device.is_busy()
