"""Ending a trial whose program ends before it is measured, by agreement among its ranks."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from zerotune.trial_lib.messages.orders import ANOTHER_HAS_FAILED
from zerotune.trial_lib.rank.device import Device
from zerotune.trial_lib.rank.endings import (
    ENDED,
    FAILED,
    WAITS,
    WORKS,
    Doing,
    EndedEarlyError,
    RankEnd,
    Stack,
    WaitsForEverError,
    are_uneven,
    doing,
    is_of_a_collective,
    place_of,
    stack_of,
    too_little_data,
    uneven_note,
    waits_for_ever,
)
from zerotune.trial_lib.rank.loader_batches import loader_batches
from zerotune.trial_lib.rank.meeting import Meeting, NoAgreementError, by_messages
from zerotune.trial_lib.rank.probe import Probe

# The guard gives the peers of a failed rank this long. A rank that waits in a thread needs no longer.
_PEERS_S, _WAITING_S = 3.0, 60.0
_NOWHERE = Doing("", "")


class Closing:
    """The end of one size's measurement, on this rank."""

    def __init__(
        self,
        probe: Probe,
        meeting: Meeting,
        leave: Callable[[], None],  # called before the measurement is handed over, if the program cannot be run again
        fail: Callable[[BaseException], None],  # records a failure and ends the process
    ) -> None:
        self.probe = probe
        self.meeting = meeting
        self.fail = fail
        self._leave = leave
        self._closes = threading.Lock()
        self._closer: threading.Thread | None = None
        self._raised: Exception | None = None

    @property
    def is_closed(self) -> bool:
        return self.probe.has_finished or self.is_closing

    @property
    def is_closing(self) -> bool:
        """Whether the program has ended, or waits forever, so that it trains no further."""
        return self._closes.locked()

    def say(self, end: RankEnd | None) -> None:
        self.meeting.say(None if end is None else {"end": asdict(end), "words": end.words})

    def by_itself(self) -> None:
        """Closes for a program that has ended. `EndedEarlyError` if it has no engine, or another rank has failed."""
        self.say(self.end(ENDED, _NOWHERE))
        if threading.current_thread() is not self.probe.thread:
            self._leave()
        self._close(ENDED, _NOWHERE, float("inf"))

    def after(self, error: BaseException) -> None:
        """Closes if the exception that has ended the program means that its data are over; else returns."""
        if _data_are_over(error, self.probe.micro_batches):
            self.by_itself()
        elif is_of_a_collective(error):
            self._close(FAILED, _NOWHERE, _PEERS_S)

    def waits(self, doing: Doing) -> None:
        """Closes, from a thread of its own, for a program that waits forever. Ends the process."""
        # A value that has to be read from a device may wait with the device.
        limit = threading.Timer(_WAITING_S, lambda: self.fail(WaitsForEverError(self._alone(doing))))
        limit.daemon = True
        limit.start()
        try:
            self._close(WAITS, doing, _WAITING_S / 2)
            self.fail(WaitsForEverError(self._alone(doing)))
        except BaseException as error:  # noqa: BLE001 - there is nobody above to hear of it
            self.fail(error)

    def _alone(self, doing: Doing) -> str:
        return waits_for_ever([self.end(WAITS, doing)], self.probe.has_engine)

    def end(self, kind: str, doing: Doing) -> RankEnd:
        return RankEnd(kind, **self.probe.progress, waits_in=doing.waits_in, where=doing.where)

    def _close(self, kind: str, doing: Doing, seconds: float) -> None:
        # Agrees with the other ranks. Returns only if a failure of this rank counts as one.
        if not self._closes.acquire(blocking=False):
            if self._closer is threading.current_thread() and self._raised is not None:
                # The program has caught the error, and has ended again.
                raise self._raised
            # Another thread of this rank is about to end the process.
            while True:
                time.sleep(_WAITING_S)
        self._closer = threading.current_thread()
        try:
            self._agree(kind, doing, seconds)
        except (EndedEarlyError, WaitsForEverError) as error:
            self._raised = error
            raise

    def _agree(self, kind: str, doing: Doing, seconds: float) -> None:
        probe = self.probe
        brought = self.meeting.gather(asdict(self.end(kind, doing)), seconds)
        ends = [] if brought is None else [RankEnd(**each) for each in brought]
        if kind == FAILED and not are_uneven(ends):
            return
        if not ends:
            raise EndedEarlyError(ANOTHER_HAS_FAILED)
        if any(end.kind == WAITS for end in ends) and (not probe.has_engine or not are_uneven(ends)):
            raise WaitsForEverError(waits_for_ever(ends, probe.has_engine))
        if not probe.has_engine:
            raise EndedEarlyError(_without_engine(probe))
        if any(end.kind != ENDED for end in ends):
            self._leave()
        self._hand_over(ends)

    def _hand_over(self, ends: list[RankEnd]) -> None:
        probe = self.probe
        counted, steps = min(end.counted for end in ends), min(end.steps for end in ends)
        if counted < probe.window.min_steps:
            elsewhere = probe.facts.steps_elsewhere
            reason = too_little_data(ends, probe.window.end_step, probe.batch)
            probe.refuse("out_of_data", f"{reason}{_another_trains(elsewhere)}" if elsewhere > steps else reason)
            return
        try:
            with by_messages(self.meeting):
                probe.measure_common(counted, steps, uneven_note(ends) if are_uneven(ends) else "")
        except NoAgreementError:
            raise EndedEarlyError(ANOTHER_HAS_FAILED) from None


def _data_are_over(error: BaseException, micro_batches: int) -> bool:
    # Whether an exception only means that there was no further batch, or none at all.
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, StopIteration):
            return True
        link = link.__cause__
    # Code after a loop that never began uses the last loss, or the number of batches.
    return micro_batches == 0 and loader_batches.came_empty and isinstance(error, (NameError, ArithmeticError))


def _another_trains(steps: int) -> str:
    return (
        f" ZeroTune measures the first engine that trains, and other engines have taken {steps} optimizer steps. "
        "To tune one of those, let the program train it first."
    )


def _without_engine(probe: Any) -> str:
    if probe.has_frozen_engine:
        return (
            "None of the program's DeepSpeed engines has an optimizer, so none of them trains. Give "
            "deepspeed.initialize an optimizer, or name one in its configuration."
        )
    return "The program ended without calling deepspeed.initialize."


# Ranks that wait for each other forever: a thread in each rank looks once a second at the rank's state

_TICK_S = 1.0
# A process that is awake for less than that only checks its threads.
_IDLE_SHARE = 0.05
_MOST_BYTES, _MOST_SLEEPS = 2**20, 3
# If one of the ranks has ended, or has had other batches, less time is enough.
_SURE_SHARE = 1 / 3


class Watcher(threading.Thread):
    """Notes when its thread stands still, and ends a wait: no rank has shown activity for `patience_s` seconds."""

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
        device, does = closing.probe.device, None
        if now - self._moved_at >= short:
            does = doing(stack, self._model_dir, device is not None and device.is_busy())
        if does is not None and does.waits_in:
            self._say(closing, closing.end(WAITS, does))
            self._decide(closing, does, now - self._moved_at)
        elif now - self._fed_at >= self._patience_s:
            self._say(closing, closing.end(WORKS, does or doing(stack, self._model_dir)))

    def _moves(self, closing: Closing, now: float) -> bool:
        # Whether another part of the process is active. It costs milliseconds, so it is asked only just before it
        # matters.
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
        self._process = psutil.Process()
        self._before = (0.0, 0.0, 0)
        self._at = 0.0

    def was(self, thread: threading.Thread, device: Device | None) -> bool:
        """Whether there was activity since the last, recent call. `device` is what the thread may wait for."""
        before, at = self._before, self._at
        moved_bytes = _bytes_of(self._process) + sum(self._of_children(_bytes_of))
        self._before, self._at = (self._seconds(thread, device), moved_bytes, _sleeps(thread)), time.monotonic()
        seconds, moved, sleeps = (abs(now - then) for now, then in zip(self._before, before, strict=True))
        if self._at - at > 2 * _TICK_S:
            return False
        return seconds > _IDLE_SHARE * (self._at - at) or moved > _MOST_BYTES or sleeps > _MOST_SLEEPS

    def _seconds(self, thread: threading.Thread, device: Device | None) -> float:
        # A thread may spin while it waits for a device. Its own time then shows nothing.
        spins = device is not None and device.is_apart and thread.ident is not None
        own = time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) if spins else 0.0
        return time.process_time() - own + sum(self._of_children(lambda child: sum(child.cpu_times()[:2])))

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
    # How often a thread has gone to sleep. A blocked thread does not do so again and again.
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/task/{thread.native_id}/status").read_text(errors="replace").splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                return int(line.split()[1])
    return 0
