"""A leash: a command that ends when the process that started it does, with all its descendants."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trial_lib.launch import bootstrap
from trial_lib.launch.guard import become_subreaper, kill_descendants

_POLL_MS = 200


class Leashed:
    """A running command on a leash.

    Args:
        command: what to run, without a shell.
        environment: all of its environment variables.
        log: file that its output is added to.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                bootstrap.command(sys.executable, "trial_lib.launch.leash", str(theirs.fileno()), *command),
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def is_running(self) -> bool:
        """Whether the command still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the command: asked first, then killed with all its descendants; returns when they are gone."""
        self._ours.close()
        self._process.wait()


def main(arguments: list[str]) -> None:
    """Entry: runs a command and holds the other end of the leash."""
    driver = socket.socket(fileno=int(arguments[0]))
    # The terminal's Ctrl-C is the driver's to hear.
    os.setsid()
    become_subreaper()
    holder = os.fork()
    if holder:
        # Stays behind as the holder's parent: when that is killed, all that it has started comes here.
        driver.close()
        os.waitpid(holder, 0)
        kill_descendants()
        return
    become_subreaper()
    _hold(driver, arguments[1:], os.getppid())
    kill_descendants()


def _hold(driver: socket.socket, words: Sequence[str], parent: int) -> None:
    """Runs a command to its end, or to that of the driver or of the parent."""
    command = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    poll = select.poll()
    poll.register(driver, 0)
    while command.poll() is None:
        if poll.poll(_POLL_MS) or os.getppid() != parent:
            command.terminate()
            try:
                command.wait(timeout=5)
            except subprocess.TimeoutExpired:
                break
