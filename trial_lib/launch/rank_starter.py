"""The one interface of all starters: a request becomes processes, and their end becomes an `ProcessesEnd`."""

import contextlib
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from trial_lib.launch.processes import channel, rank_process
from trial_lib.launch.processes.config_check import Judgement
from trial_lib.wire.layer import Layer

HOST, GUARD = "host", "guard"
"""What ended a trial's processes: the death of a host, or of their guard."""

_POLL_S = 0.1
_LOOK_S = 2.0
_STOPPED_LOOKS = 5


@dataclass(frozen=True)
class RankRequest:
    """One rank to start.

    Attributes:
        environment: all of its environment variables.
        log: path that its output goes to.
        cores: processor cores it is pinned to; empty for no pinning.
    """

    environment: dict[str, str]
    log: str
    cores: list[int]


@dataclass(frozen=True)
class LaunchRequest:
    """A trial's processes.

    Attributes:
        interpreter: the Python that runs them.
        entry: what each rank calls, `module:function`, with the payload and its rank.
        payload: plain data for the entry.
        cwd: the working directory.
        ranks: one for each process.
        deadline_s: seconds after which all are killed.
        grace_s: seconds that the other ranks have to end once one has failed.
        first_rank: the rank of the first of them, where others run on other hosts.
        descriptors: that the guard and its keeper hold as long as they live: of the trial's slots, which are then not
            given away before the last rank is gone, however the driver ends.
        layer: through which the ranks are to see the program's folder, where the host can do that; None for none.
        beside_builds: whether they may run while ops are built that they do not need: what they measure is no time.
    """

    interpreter: str
    entry: str
    payload: dict[str, Any]
    cwd: str
    ranks: list[RankRequest]
    deadline_s: float
    grace_s: float = 5.0
    first_rank: int = 0
    descriptors: tuple[int, ...] = ()
    layer: Layer | None = None
    beside_builds: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the request as it travels to a guard; its descriptors travel beside it."""
        plain = asdict(self)
        del plain["descriptors"]
        return plain


@dataclass(frozen=True)
class ProcessesEnd:
    """How a trial's processes ended.

    Attributes:
        ended_by: `ranks` (by themselves), `deadline`, `cancel`, `guard` (the guard itself was killed), or
            `host` (a host has died).
        statuses: exit status by rank; negative for a signal, None for a rank that was killed here.
        host: the host that has died, or could not be reached.
        host_rank: the first rank there.
        leavings: the bytes of segments of shared memory by their names: `removed`, and `left` by who knows whom.
    """

    ended_by: str
    statuses: list[int | None]
    host: str = ""
    host_rank: int = 0
    leavings: dict[str, dict[str, int]] = field(default_factory=dict)


class Launched:
    """Processes that run. Closing the socket ends them, whoever does it and for whatever reason."""

    def __init__(self, guard: socket.socket, ranks: int) -> None:
        self._guard = guard
        self._ranks = ranks
        self._lock = threading.Lock()
        self._open = True
        self._is_cancelled = False

    def wait(self) -> ProcessesEnd:
        """Waits until no process of the trial is left.

        A keeper that somebody has stopped is woken: where its guard is stopped as well, nobody else ends the trial.
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
        # It would hold the trial's slots for as long as it stays stopped.
        rank_process.wake(keeper)
        with self._lock:
            self._open = False
            self._guard.close()
        if told is None:
            return ProcessesEnd(GUARD, [None] * self._ranks)
        return ProcessesEnd(told["ended_by"], told["statuses"], leavings=told.get(channel.LEAVINGS) or {})

    def is_running(self) -> bool:
        """Returns whether its end has not been waited for yet."""
        return self._open

    def wait_or_cancel(self, cancelled: threading.Event) -> ProcessesEnd:
        """Waits like `wait`, and cancels when the event is set."""
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
        """Has all processes killed; `wait` returns once they are gone. Callable from any thread."""
        with self._lock:
            self._is_cancelled = True
            if self._open:
                self._guard.shutdown(socket.SHUT_WR)


class StarterClosedError(Exception):
    """The starter was closed before the trial's processes started."""


class RankStarter(Protocol):
    """Starts trials; `close` ends what it keeps running between them."""

    def launch(self, request: LaunchRequest) -> Launched:
        """Starts a trial's processes.

        Raises:
            StarterClosedError: `close` was called meanwhile.
        """

    def check(self, ds_config: Mapping[str, Any], slots: int) -> Judgement | None:
        """Returns what the DeepSpeed of the ranks refuses of a configuration; None where nobody could be asked.

        Args:
            ds_config: a DeepSpeed configuration, which may leave things to the code.
            slots: devices that train together.
        """

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """Has DeepSpeed's ops built that trials are going to need, where nobody has asked for that yet; waits for them.

        Args:
            builders: the names of their builders.

        Returns:
            Why ops cannot be built, by the names of their builders: these, and those of before.
        """

    def prime(self, modules: list[str]) -> None:
        """Is told what the profile trial had imported, so that later trials need not import it again."""

    def close(self) -> None:
        """Ends everything."""
