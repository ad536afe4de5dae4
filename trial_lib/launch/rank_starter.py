"""The interface of all starters. A request becomes processes, and their end becomes a `ProcessesEnd`."""

import contextlib
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from trial_lib.launch.processes import channel, rank_process
from trial_lib.launch.processes.config_check import Judgement
from trial_lib.messages.folders import Layer
from trial_lib.messages.orders import Import

HOST, GUARD = "host", "guard"
"""Two causes of an end: a host has died, or the guard was killed."""

_POLL_S = 0.1
_LOOK_S = 2.0
_STOPPED_LOOKS = 5


@dataclass(frozen=True)
class RankRequest:
    environment: dict[str, str]  # all its environment variables
    log: str  # path of the file for its output
    cores: list[int]  # the processor cores that it is pinned to. Empty for no pinning.


@dataclass(frozen=True)
class LaunchRequest:
    interpreter: str  # the Python that runs them
    entry: str  # the function that each rank calls with the payload and its rank, as `module:function`
    payload: dict[str, Any]  # plain data for the entry
    cwd: str  # the working directory
    ranks: list[RankRequest]  # one for each process
    deadline_s: float  # seconds until the guard kills all of them
    grace_s: float = 5.0  # seconds that the other ranks have to end after one has failed
    first_rank: int = 0  # the rank of the first process. Above 0 if other ranks run on other hosts.
    # File descriptors that the guard and its keeper hold. They lock the trial's slots until the last rank is gone,
    # however the driver ends.
    descriptors: tuple[int, ...] = ()
    # The layer through which the ranks see the program's folder, if the host can make one. None for none.
    layer: Layer | None = None
    beside_builds: bool = False  # whether the ranks may run before ops are built. They then measure no time.
    starts_cold: bool = False  # whether the ranks need new interpreters, whatever the starter

    def to_json(self) -> dict[str, Any]:
        """Returns the request as the guard receives it. The descriptors travel beside it."""
        plain = asdict(self)
        del plain["descriptors"]
        return plain


@dataclass(frozen=True)
class ProcessesEnd:
    # `ranks` (by themselves), `deadline`, `cancel`, `guard` (the guard was killed), `host` (a host has died), or
    # `stopped` and `replaced` (a rank has come to a stop, or executes another program)
    ended_by: str
    statuses: list[int | None]  # exit status by rank. Negative for a signal, None for a rank that the guard killed.
    host: str = ""  # the host that has died, or could not be reached
    host_rank: int = 0  # the first rank on that host
    rank: int = 0  # the rank that was stopped, or that executes another program
    seen: str = ""  # the signal that has stopped it, or its new command line
    # Segments of shared memory with their bytes: those that were `removed`, and those of unknown processes, which were
    # `left`
    leavings: dict[str, dict[str, int]] = field(default_factory=dict)


class Launched:
    """Processes that run. They end when the socket closes, for any reason."""

    def __init__(self, guard: socket.socket, ranks: int) -> None:
        self._guard = guard
        self._ranks = ranks
        self._lock = threading.Lock()
        self._open = True
        self._is_cancelled = False

    def wait(self) -> ProcessesEnd:
        """Waits until no process of the trial is left.

        A stopped keeper (SIGSTOP) is woken. If its guard is stopped as well, only the keeper can end the trial.
        """
        told, keeper, stopped_for = None, 0, 0
        with contextlib.suppress(OSError):
            while True:
                if select.select([self._guard], [], [], _LOOK_S)[0]:
                    received = channel.receive(self._guard)
                    if received is None:
                        break
                    if channel.KEEPER not in received[0]:
                        told = received[0]
                        break
                    keeper = received[0][channel.KEEPER]
                stopped_for = stopped_for + 1 if rank_process.is_stopped(keeper) else 0
                if stopped_for and (self._is_cancelled or stopped_for > _STOPPED_LOOKS):
                    rank_process.wake(keeper)
        # A stopped keeper would hold the trial's slots.
        rank_process.wake(keeper)
        with self._lock:
            self._open = False
            self._guard.close()
        if told is None:
            return ProcessesEnd(GUARD, [None] * self._ranks)
        lost = {"rank": told.get("rank", 0), "seen": told.get("seen", "")}
        return ProcessesEnd(told["ended_by"], told["statuses"], leavings=told.get(channel.LEAVINGS) or {}, **lost)

    def is_running(self) -> bool:
        """Returns whether `wait` has not returned yet."""
        return self._open

    def wait_or_cancel(self, cancelled: threading.Event) -> ProcessesEnd:
        ended = threading.Event()

        def watch() -> None:
            while not ended.is_set():
                if cancelled.wait(timeout=_POLL_S):
                    self.cancel()
                    return

        threading.Thread(target=watch, daemon=True, name="cancel-trial").start()
        try:
            return self.wait()
        finally:
            ended.set()

    def cancel(self) -> None:
        """Has the guard kill all processes. `wait` returns when they are gone. Any thread may call this."""
        with self._lock:
            self._is_cancelled = True
            if self._open:
                self._guard.shutdown(socket.SHUT_WR)


class StarterClosedError(Exception): ...


class RankStarter(Protocol):
    """Starts trials. `close` ends the processes that it keeps between trials."""

    def prepare(self, beside_builds: bool, starts_cold: bool) -> None:
        """Waits for all that a launch needs and that needs no slots: builds of ops, and a primed server."""

    def launch(self, request: LaunchRequest) -> Launched:
        """Starts a trial's processes.

        Raises:
            StarterClosedError: another thread has called `close`.
        """

    def check(self, ds_config: Mapping[str, Any], slots: int) -> Judgement | None:
        """Returns what the ranks' DeepSpeed refuses in a configuration, which may leave settings to the code.

        None if no process could answer.
        """

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """Has the ops built that trials will need, once each, and waits.

        Returns the reason for each op, requested now or before, that cannot be built, by its builder's name.
        """

    @property
    def has_compiled(self) -> bool: ...

    def prime(self, imported: Sequence[Import]) -> None:
        """Imports the modules of the profile trial ahead, so that later trials start faster."""

    def close(self) -> None: ...


# A starter whose running processes can be ended without ending the starter.


class Launches(Protocol):
    """Starts the processes of a run."""

    def launch(self, request: LaunchRequest) -> Launched: ...


class EndableStarter:
    def __init__(self, starter: Launches) -> None:
        self._starter = starter
        self._lock = threading.Lock()
        self._running: list[Launched] = []
        self.has_ended = False

    def launch(self, request: LaunchRequest) -> Launched:
        launched = self._starter.launch(request)
        with self._lock:
            self._running.append(launched)
            ended = self.has_ended
        if ended:
            launched.cancel()
        return launched

    def end(self) -> None:
        """Ends the processes that run, and those that still start. Any thread may call this."""
        with self._lock:
            was_ended, self.has_ended = self.has_ended, True
            running = [] if was_ended else list(self._running)
        for launched in running:
            launched.cancel()
