"""A leash: a command that ends, with all its descendants, when the process that started it ends."""

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from trial_lib.launch.processes import bootstrap
from trial_lib.launch.processes.keeper import kill_descendants, leave_keeper, wait_for
from trial_lib.wire.whole_files import open_own

_POLL_MS = 200
_TERM_S = 5.0
# The holder gives the command its time, and kills what is left.
_CLOSE_S = 2 * _TERM_S


class Leashed:
    """A running command on a leash.

    Args:
        command: its words; no shell is used.
        environment: all of its environment variables.
        log: the file to which its output is appended.
        folder: its working directory; None for this process's.
        descriptors: open files that it inherits.
    """

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
                bootstrap.command(sys.executable, "trial_lib.launch.processes.leash", listed, *command),
                pass_fds=inherited,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def is_running(self) -> bool:
        """Whether the command still runs."""
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
    """Runs a command until it, the driver or the parent ends; returns its status."""
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
