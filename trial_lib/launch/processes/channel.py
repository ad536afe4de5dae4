"""Messages between processes, and questions that a process of its own answers.

The driver, the fork server and the guards exchange messages. A message is JSON behind its length, and descriptors.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from zerotune.trial_lib.launch.processes.bootstrap import command
from zerotune.trial_lib.launch.processes.watchdog import die_with_parent

WATCHDOG = "watchdog"
"""The key of the first message of a trial's processes: the process id of their guard's watchdog.

Their last message has the fields of `ProcessesEnd`.
"""

_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 253  # the most that the kernel transfers at once


def send(channel: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Sends one message. An `OSError` means that the other end is gone."""
    body = json.dumps(message).encode()
    header = _LENGTH.pack(len(body))
    if descriptors:
        socket.send_fds(channel, [header], list(descriptors))
    else:
        channel.sendall(header)
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Returns the next message and its file descriptors. None if the other end has closed."""
    header, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, _MOST_DESCRIPTORS)
    try:
        while 0 < len(header) < _LENGTH.size:
            header = header + _some(channel, _LENGTH.size - len(header))
        if not header:
            return None
        body = bytearray()
        (length,) = _LENGTH.unpack(header)
        while len(body) < length:
            body += _some(channel, length - len(body))
    except EOFError:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return json.loads(body), list(descriptors)


def _some(channel: socket.socket, most: int) -> bytes:
    data = channel.recv(most)
    if not data:
        raise EOFError
    return data


# A question that another process answers in JSON, because it may block, crash, or leave a driver initialised.

_KILLED_S = 2.0


class NoAnswerError(Exception):
    """The process has failed. The words are the last line of its errors."""


class Question:
    """A question to a module in an interpreter. Its `main` gets a descriptor for the answer behind the arguments."""

    def __init__(
        self, interpreter: str, environment: Mapping[str, str], module: str, *arguments: str, given: str = ""
    ) -> None:
        listen, tell = os.pipe()
        self._answer = os.fdopen(listen, encoding="utf-8")
        self._given = given
        try:
            self._process = subprocess.Popen(
                command(interpreter, module, *arguments, str(tell)),
                pass_fds=[tell],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        except BaseException:
            self._answer.close()
            raise
        finally:
            os.close(tell)

    def answer(self, within_s: float) -> Any:
        """Raises NoAnswerError if the process fails, and TimeoutError if it has not ended in time."""
        with self._answer:
            try:
                _, words = self._process.communicate(self._given, timeout=within_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                # A process that hangs in the kernel dies when the driver releases it, if ever. Nobody waits for that.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.communicate(timeout=_KILLED_S)
                raise TimeoutError from None
            text = self._answer.read()
        # A library may abort the process at its exit, after the answer.
        if not text:
            raise NoAnswerError((words.strip().splitlines() or [f"it ended with {self._process.returncode}"])[-1])
        return json.loads(text)

    def end(self) -> None:
        """Kills the process. A thread that waits for its answer gets none."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)


def ask_fork(question: Callable[[], Any], within_s: float) -> Any:
    """Returns what a fork of this process answers. Raises NoAnswerError if the question raises, or ends the fork."""
    listen, tell = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(parent)
            # An import that is timed in the parent has a handler of its own.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, within_s)
            os.close(listen)
            with open(tell, "w", encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
                json.dump(_answered(question), pipe, default=str)
        finally:
            os._exit(0)
    os.close(tell)
    with open(listen, encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
        answered: dict[str, Any] = json.loads(pipe.read() or "{}")
    # The fork server's housekeeping may have waited for it already.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    if "answer" not in answered:
        raise NoAnswerError(answered.get("error", "the process that was asked has died"))
    return answered["answer"]


def _answered(question: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"answer": question()}
    except Exception as error:  # noqa: BLE001 - raised again in the process that wanted to know
        return {"error": f"{type(error).__name__}: {error}"}
