"""What starters are given and give back: a program and its ranks become processes, and their end a `ProcessesEnd`."""

import contextlib
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.inputs.launchers import launcher_named
from zerotune.trial_lib.launch.processes import channel
from zerotune.trial_lib.launch.processes.environment_check import Judgement
from zerotune.trial_lib.launch.processes.watchdog import LOOK_S, StoppedLooks, wake
from zerotune.trial_lib.messages.folders import Layer
from zerotune.trial_lib.messages.measurement import Import

HOST, GUARD = "host", "guard"
"""Two causes of an end: a host has died, or the guard was killed."""

_POLL_S = 0.1

# The user's program, and its ranks on given slots.


@dataclass(frozen=True)
class Program:
    """The user's program. Only its arguments differ between the trials of a study."""

    interpreter: str  # the Python that runs it
    target: dict[str, str]  # `{"script": path}` or `{"module": name}`
    arguments: list[str]  # the arguments of its command line
    local_rank_option: str  # as `RankOrder` has it
    model_dir: Path  # its working directory
    environment: dict[str, str]  # all its environment variables, except those of the rank
    launched_by: str | None = None  # the name of the user's launcher, as in `Entrypoint`
    # The texts of the trial's copies of files that its arguments name, by their paths
    files: dict[str, str] = field(default_factory=dict)
    # The differences of its command from the user's: the old text, which is empty if something was added, and the new
    changes: list[tuple[str, str]] = field(default_factory=list)
    starts_cold: bool = False  # whether its ranks need new interpreters, because a trial varies an environment variable


@dataclass(frozen=True)
class RankRequest:
    environment: dict[str, str]  # all its environment variables
    log: str  # path of the file for its output
    cores: list[int]  # the processor cores that it is pinned to. Empty for no pinning.


@dataclass(frozen=True)
class HostRanks:
    first_rank: int  # the first rank on the host
    slots: int  # the number of ranks on the host
    world_size: int  # the number of ranks on all hosts
    address: str  # the address of the rendezvous
    port: int  # the port of the rendezvous


def rank_requests(
    program: Program, host: Host, slots: list[str], port: int, logs: list[Path], part: HostRanks | None = None
) -> list[RankRequest]:
    """Returns one rank for each slot, with the environment that the user's launcher would give it.

    `deepspeed` sets variables that no other launcher sets (deepspeed/launcher/launch.py). With LOCAL_SIZE, DeepSpeed
    takes each rank on a CPU for a device of its own, and its collectives use shared memory.
    """
    part = part or HostRanks(0, len(slots), len(slots), "127.0.0.1", port)
    shared = {
        **program.environment,
        "WORLD_SIZE": str(part.world_size),
        "LOCAL_WORLD_SIZE": str(len(slots)),
        "MASTER_ADDR": part.address,
        "MASTER_PORT": str(port),
    }
    launcher = launcher_named(program.launched_by)
    if launcher.sets_local_size:
        # All hosts have the same number of ranks.
        number, hosts = part.first_rank // len(slots), part.world_size // len(slots)
        shared |= {"LOCAL_SIZE": str(len(slots)), "CROSS_RANK": str(number), "CROSS_SIZE": str(hosts)}
    kind = kind_of(host.device)
    shared |= kind.environment(slots)
    requests = []
    for local, (slot, log) in enumerate(zip(slots, logs, strict=False)):
        own = part.first_rank + local
        numbers = {"rank": own, "local_rank": local, "ranks": part.world_size, "local_ranks": part.slots}
        # The same numbers by the other names that the launcher uses.
        more = {name: value.format(**numbers) for name, value in launcher.rank_variables.items()}
        environment = {**shared, "RANK": str(own), "LOCAL_RANK": str(local), **more}
        requests.append(RankRequest(environment, str(log), kind.cores(slot)))
    return requests


# A launch, and its processes.


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
    # File descriptors that the guard and its watchdog hold. They lock the trial's slots until the last rank is gone,
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
    shared_memory: dict[str, dict[str, int]] = field(default_factory=dict)


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

        A stopped watchdog (SIGSTOP) is woken. If its guard is stopped as well, only the watchdog can end the trial.
        """
        end, watchdog, stopped = None, 0, StoppedLooks()
        with contextlib.suppress(OSError):
            while True:
                if select.select([self._guard], [], [], LOOK_S)[0]:
                    received = channel.receive(self._guard)
                    if received is None:
                        break
                    if channel.WATCHDOG not in received[0]:
                        end = received[0]
                        break
                    watchdog = received[0][channel.WATCHDOG]
                if stopped.are_stopped([watchdog]) and (self._is_cancelled or stopped.stay_stopped):
                    wake(watchdog)
        # A stopped watchdog would hold the trial's slots.
        wake(watchdog)
        with self._lock:
            self._open = False
            self._guard.close()
        if end is None:
            return ProcessesEnd(GUARD, [None] * self._ranks)
        return ProcessesEnd(**end)

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
        """Starts a trial's processes. Raises StarterClosedError: another thread has called `close`."""

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
        self._has_ended = False

    def launch(self, request: LaunchRequest) -> Launched:
        launched = self._starter.launch(request)
        with self._lock:
            self._running.append(launched)
            ended = self._has_ended
        if ended:
            launched.cancel()
        return launched

    def end(self) -> None:
        """Ends the processes that run, and those that still start. Any thread may call this."""
        with self._lock:
            was_ended, self._has_ended = self._has_ended, True
            running = [] if was_ended else list(self._running)
        for launched in running:
            launched.cancel()
