"""A keeper: the parent that a supervising process leaves behind, so that a kill of the process leaves nothing alive.

    driver ── keeper ── guard ── ranks and all that they start

Both the guard and its keeper are subreapers. An orphan of the ranks becomes a child of the guard. If the guard is
killed, its children become children of the keeper, which kills them. Four processes have a keeper: the guard of a
trial, a leash, one host's part of a trial, and a build of DeepSpeed's ops.
"""

import contextlib
import ctypes
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from trial_lib.launch.processes import bootstrap, rank_process
from trial_lib.messages.files import open_own
from trial_lib.messages.shared_segments import held_by

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01
_STUCK_S = 30.0
_MEMORY_LOOK_S = 1.0
_SHARE_OF_MEMORY = 1e-3
_LEASH_POLL_MS = 100


@dataclass(frozen=True)
class Kept:
    """A process that had a keeper, when it and all its descendants have ended."""

    pid: int  # of the process
    status: int  # as `os.waitpid` returns it
    held: set[str]  # names of the segments of shared memory that its last descendants had mapped
    pids: set[int]  # of these descendants


def wait_for(pid: int) -> int:
    """Waits for a child, and returns its status as `os.waitpid` does."""
    return os.waitpid(pid, 0)[1]


def leave_keeper(
    clean_up: Callable[[Kept], int], wait: Callable[[int], int] = wait_for, survives_keeper: bool = False
) -> None:
    """Goes on as a fork. This process stays behind as the fork's keeper, and does not return.

    A keeper that someone has stopped goes on when its own parent ends.
    """
    become_subreaper()
    rank_process.go_on_without_parent(os.getppid())
    keeper = os.getpid()
    kept = os.fork()
    if kept:
        status = wait(kept)
        os._exit(clean_up(Kept(kept, status, *kill_descendants())))
    if survives_keeper:
        rank_process.go_on_without_parent(keeper)
    else:
        rank_process.die_with_parent(keeper)
    become_subreaper()


def wait_on_leash(
    process: "subprocess.Popen[bytes]", leash: int, meanwhile: Callable[[], None] = lambda: None
) -> int | None:
    """Waits until a child has ended, and returns its status, or until the other end of a leash has closed (None)."""
    poll = select.poll()
    poll.register(leash, select.POLLIN)
    while process.poll() is None and not poll.poll(_LEASH_POLL_MS):
        meanwhile()
    return process.poll()


def become_subreaper() -> None:
    """Makes orphans among this process's descendants its children, also those in sessions of their own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> tuple[set[str], set[int]]:
    """Kills every descendant of this process and waits until none is left, or the rest make no progress.

    Returns the segments of shared memory that they had mapped, and their process ids.
    """
    held, pids = set[str](), set[int]()
    if not _has_children():
        # Usually nothing is left, and a look through all processes of the host takes longer.
        return held, pids
    patience = _Patience()
    while not patience.is_over():
        descendants = psutil.Process().children(recursive=True)
        held |= held_by(process.pid for process in descendants if process.pid not in pids)
        pids.update(process.pid for process in descendants)
        patience.note(len(descendants))
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(_POLL_S)
    return held, pids


def _has_children() -> bool:
    # Whether this process has a child, running or not yet reaped. Without one it has no descendants.
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class _Patience:
    """Decides when to stop waiting for killed processes: for a while, none has ended and no memory has come free.

    A killed process lives on while a driver unlocks its memory, at some gigabytes of the host's memory a second. A
    process that is stuck in a driver dies when the driver lets it, if ever.
    """

    def __init__(self) -> None:
        self._fewest: float = math.inf
        memory = psutil.virtual_memory()
        self._most_free, self._step = memory.available, memory.total * _SHARE_OF_MEMORY
        self._since = self._looked_at = time.monotonic()

    def note(self, processes: int) -> None:
        now = time.monotonic()
        if processes < self._fewest:
            self._fewest, self._since = processes, now
        if now - self._looked_at >= _MEMORY_LOOK_S:
            self._looked_at = now
            if (free := psutil.virtual_memory().available) >= self._most_free + self._step:
                # A new maximum counts, not any increase: other processes take memory and give it back meanwhile.
                self._most_free, self._since = free, now

    def is_over(self) -> bool:
        return time.monotonic() - self._since > _STUCK_S


# A leash: a command that ends, with all its descendants, when the process that started it ends.

_POLL_MS = 200
_TERM_S = 5.0
# The holder gives the command its time, and kills what is left.
_CLOSE_S = 2 * _TERM_S


class Leashed:
    """A running command on a leash."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs, open_own(log, "ab") as output:
            inherited = [theirs.fileno(), *descriptors]
            listed = ",".join(map(str, inherited))
            self._process = subprocess.Popen(
                bootstrap.command(sys.executable, "trial_lib.launch.processes.keeper", listed, *command),
                pass_fds=inherited,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit code of a command that has ended by itself, as a shell shows it; None while it runs."""
        return self._process.poll()

    @property
    def processes(self) -> list[psutil.Process]:
        """The command and all its descendants, each after its parent."""
        try:
            # The first is the process that holds the leash.
            return psutil.Process(self._process.pid).children(recursive=True)[1:]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kills the command and its descendants at once, parents first, so that no parent notices a child's end."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.close()

    def close(self) -> None:
        """Ends the command: by SIGTERM first, then by a kill of all its descendants. Returns when they are gone."""
        self._ours.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            # The processes that hold the leash are stopped (SIGSTOP).
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            self._process.kill()
            self._process.wait()


def main(arguments: list[str]) -> None:
    """Entry: runs a command and holds the other end of the leash."""
    leash, *descriptors = map(int, arguments[0].split(","))
    driver = socket.socket(fileno=leash)
    # The driver handles the terminal's Ctrl-C.
    os.setsid()

    def wait(holder: int) -> int:
        driver.close()
        return wait_for(holder)

    # A holder whose keeper is killed still ends the command in order.
    leave_keeper(lambda holder: os.waitstatus_to_exitcode(holder.status), wait, survives_keeper=True)
    status = _hold(driver, arguments[1:], descriptors, os.getppid())
    kill_descendants()
    # A signal has a status above 128, as in a shell, because an exit code cannot be negative.
    sys.exit(status if status >= 0 else 128 - status)


def _hold(driver: socket.socket, words: Sequence[str], descriptors: Sequence[int], parent: int) -> int:
    # Runs a command until it, the driver or the parent ends; returns its status.
    command = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=descriptors)
    poll = select.poll()
    poll.register(driver, 0)
    while command.poll() is None:
        if poll.poll(_POLL_MS) or os.getppid() != parent:
            command.terminate()
            try:
                command.wait(timeout=_TERM_S)
            except subprocess.TimeoutExpired:
                return 0
    return command.returncode
