"""A server as a child process. It ends when the process that has started it ends."""

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flows.interrupts import interrupts
from flows.process_limit import OUT_OF_PROCESSES
from flows.servers.held_port import HeldPort
from trial_lib.launch.processes.leash import Leashed

_READY_S = 180.0
_POLL_S = 0.05
# A library that cannot start a thread ends in one of these words, or in an abort.
_NO_PROCESS = re.compile(r"can't start new thread|Resource temporarily unavailable|pthread_create failed|Errno 11\b")


class ServerError(RuntimeError):
    """A server does not answer. ZeroTune has started it, or it is the user's own."""


@dataclass
class Service:
    """A server process.

    Attributes:
        name: for messages, such as `The MLflow UI`.
        command: the words of its command. No shell is used.
        environment: all of its environment variables.
        log: the file with its output since its start.
        port: at which it refuses a request without a credential once it is ready. None if it listens to no port.
        shares_log: whether other processes write to the same log.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    port: HeldPort | None = None
    shares_log: bool = False
    _process: Leashed | None = field(default=None, init=False)

    def start(self) -> None:
        """Starts it. A log that it does not share begins anew, and the previous one is kept as `log_before`."""
        if not self.shares_log:
            with contextlib.suppress(FileNotFoundError):
                self.log.replace(self.log_before)
        descriptors = []
        if self.port is not None:
            self.port.refuse()
            descriptors.append(self.port.descriptor)
        self._process = Leashed(self.command, self.environment, self.log, descriptors=descriptors)

    @property
    def log_before(self) -> Path:
        """The file with the output of its previous run."""
        return self.log.with_suffix(".before.log")

    @property
    def is_running(self) -> bool:
        """Whether its process is alive."""
        return self._process is not None and self._process.is_running

    def wait_until_ready(self) -> None:
        """Waits until it answers.

        Raises:
            ServerError: it ended, or did not answer within `_READY_S`.
            KeyboardInterrupt: a signal has arrived.
        """
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and self.is_running:
            interrupts.check()
            if self.answers():
                return
            time.sleep(_POLL_S)
        raise ServerError(f"{self.name} did not start. Its log is {self.log}.")

    def answers(self) -> bool:
        """Returns whether it answers, after two seconds at most."""
        if self.port is None:
            return True
        # An answer at this port would be another process's.
        if not self.port.is_listening:
            return False
        # `zerotune --help` has no time for this import.
        import http.client
        import urllib.error
        import urllib.request

        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            direct.open(self.port.url, timeout=2).close()
        except urllib.error.HTTPError as refusal:
            return refusal.code == 401
        except (OSError, http.client.HTTPException):
            pass
        return False

    def kill(self) -> None:
        """Kills it, if it can no longer end in order, with all processes that it has started."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends it and all processes that it has started. Returns when they are gone."""
        if self._process is not None:
            self._process.close()


def run_to_end(command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> tuple[int, str]:
    """Runs a command to its end. Returns its exit code and its output. It ends when this process ends.

    Args:
        command: its words. No shell is used.
        environment: all of its environment variables.
        folder: its working folder.
        log: the file for its output, which begins anew.

    Raises:
        KeyboardInterrupt: a signal has arrived. The command has been ended.
    """
    log.unlink(missing_ok=True)
    process = Leashed(command, environment, log, folder)
    try:
        while process.is_running:
            interrupts.check()
            time.sleep(_POLL_S)
    finally:
        process.close()
    return process.status or 0, log.read_text(errors="replace").strip()


def migrate(
    what: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, remedy: str = ""
) -> None:
    """Runs a command that migrates a database.

    Args:
        what: the beginning of the error, `Prefect could not migrate FILE`.
        command: as for `run_to_end`, like the next three.
        environment: of the command.
        folder: of the command.
        log: of the command.
        remedy: one sentence on what the user can do.

    Raises:
        ServerError: the migration failed.
        KeyboardInterrupt: a signal has arrived.
    """
    exit_code, output = run_to_end(command, environment, folder, log)
    if exit_code != 0:
        last = (output.splitlines() or ["it printed nothing"])[-1]
        if _NO_PROCESS.search(output):
            remedy = f"The cause: {OUT_OF_PROCESSES}"
        raise ServerError(" ".join(filter(None, (f"{what} to its schema ({last}).", remedy))))
