"""The fork server of the warm starter: an interpreter that has imported torch and DeepSpeed, and only forks.

Runs in the user's environment. It must stay fit to fork (see `priming`), and checks that before each fork.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil

from trial_lib.launch.processes import channel, config_check, rank_process
from trial_lib.launch.processes.guard import Guard, become_guard
from trial_lib.launch.processes.keeper import become_subreaper, kill_descendants
from trial_lib.launch.processes.priming import doubt, import_all, prime
from trial_lib.launch.processes.torch_cache import remove_empty_torch_cache

_HOUSEKEEPING_S = 0.5
_GUARDS_S = 2.0
# Waits for the end of one of its children, and lets others that end go.
_WAIT = "import os, sys\nwhile os.wait()[0] != int(sys.argv[1]): pass"
_STANDARD_STREAMS = 2
# Modules that are found one after the other to make forks unsafe, before the code's imports are all left to the ranks.
_MOST_LEFT_OUT = 5


class ForkServer:
    """Answers the driver: `{"launch": request}` with a socket for the trial's guard, `{"prime": modules}`, or
    `{"check": request}` (see `config_check`).
    """

    def __init__(self, driver: socket.socket) -> None:
        self._driver = driver
        self._guards: set[int] = set()

    def serve(self) -> None:
        """Serves until the driver is gone."""
        while True:
            readable, _, _ = select.select([self._driver], [], [], _HOUSEKEEPING_S)
            self._reap()
            if not readable:
                continue
            received = channel.receive(self._driver)
            if received is None:
                return
            message, descriptors = received
            if "prime" in message:
                self._prime(message["prime"])
            elif config_check.CHECK in message:
                config_check.answer(self._driver, message[config_check.CHECK], doubt() is None)
            else:
                self._launch(message["launch"], descriptors)

    def _prime(self, modules: list[str]) -> None:
        """Imports `modules`, while a fork stands by: one of them may spoil this process, and the fork then takes over.

        It leaves out what has spoilt its parent, and all of the modules where too many do.
        """
        left_out: set[str] = set()
        while True:
            listen, tell = os.pipe()
            parent = os.getpid()
            reserve = os.fork()
            if reserve == 0:
                os.close(tell)
                rank_process.die_with_parent(parent)
                become_subreaper()
                with open(listen, encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
                    told = pipe.read()
                if not told:
                    os._exit(0)
                self._guards.clear()
                left_out.add(told)
                continue
            os.close(listen)
            with _importing():
                spoilt_by = None if len(left_out) > _MOST_LEFT_OUT else import_all(modules, left_out)
            with open(tell, "w", encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
                pipe.write(spoilt_by or "")
            if spoilt_by:
                self._stand_aside(reserve)
            os.waitpid(reserve, 0)
            break
        if left_out:
            names = ", ".join(sorted(left_out))
            what = "all of the code's imports" if len(left_out) > _MOST_LEFT_OUT else "what imports them"
            self._note(f"the fork server could not fork with {names}: these and {what} are paid in each trial")
        channel.send(self._driver, {"primed": True})

    def _stand_aside(self, successor: int) -> None:
        """Waits for the end of the fork that serves from now on, as a program that has none of this one's imports.

        It is the same process, whose child the successor is. What the imports have taken of a GPU is given back.
        """
        self._driver.close()
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers alone
            # The log stays; a driver's own files need not be such as a new program does not inherit.
            if descriptor > _STANDARD_STREAMS:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        with contextlib.suppress(OSError):
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _WAIT, str(successor)])
        while os.wait()[0] != successor:
            pass
        os._exit(1)

    def _note(self, text: str) -> None:
        channel.send(self._driver, {"note": text})

    def _launch(self, request: dict[str, Any], descriptors: list[int]) -> None:
        reason = doubt()
        if reason is None:
            pid = os.fork()
            if pid == 0:
                self._driver.close()
                _become_guard(request, socket.socket(fileno=descriptors[0]), descriptors[1:])
            self._guards.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(self._driver, {"doubt": reason})

    def _reap(self) -> None:
        """Lets ended trials go, and kills what a killed keeper left: the server is the next subreaper above it."""
        has_ended = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                has_ended = True
                self._guards.discard(pid)
        if not has_ended:
            # Nobody has left anything: to look through all processes of the host takes the ranks' cores from them.
            return
        for child in psutil.Process().children():
            if child.pid not in self._guards:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def _become_guard(request: dict[str, Any], driver: socket.socket, held: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    become_guard(request, driver)
    guard = os.getpid()

    def start_rank(rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            driver.close()
            for descriptor in held:
                os.close(descriptor)
            try:
                rank_process.become(request, rank, guard)
            finally:
                # Not up through the frames of the guard that it was forked from.
                os._exit(1)
        return pid

    try:
        Guard(driver, request, start_rank).supervise()
    finally:
        os._exit(1)


def _keep(driver: socket.socket, server: int) -> None:
    """Stays behind as the server's parent: when the driver dies, also in the middle of a build, ends all below."""
    poll = select.poll()
    poll.register(driver, 0)
    while os.waitpid(server, os.WNOHANG)[0] == 0:
        if poll.poll(_HOUSEKEEPING_S * 1000):
            # The guards have seen it too, and clean up behind their trials.
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
            _wait_for_children(_GUARDS_S)
            kill_descendants()
            return
    # The server was killed. Trials that run have guards of their own, and the driver at the end of their sockets.
    driver.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _wait_for_children(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Spares imports the garbage collector's passes, a fifth of their time; what they leave it never looks at again."""
    thresholds = gc.get_threshold()
    # Not `gc.disable`: a library that is imported may call that itself, for its program.
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*thresholds)


def main(arguments: list[str]) -> None:
    """Entry: primes, says so, serves.

    Args:
        arguments: the descriptor of the driver's socket, then the DeepSpeed ops to build and load.
    """
    driver = socket.socket(fileno=int(arguments[0]))
    # The terminal's Ctrl-C is the driver's to hear.
    os.setsid()
    become_subreaper()
    rank_process.go_on_without_parent(os.getppid())
    server = os.fork()
    if server:
        _keep(driver, server)
        # Of the imports: a driver that has died cannot do it.
        remove_empty_torch_cache(os.environ)
        return
    rank_process.die_with_parent(os.getppid())
    become_subreaper()
    try:
        with _importing():
            prime(driver, arguments[1:])
        channel.send(driver, {"ready": True, "doubt": doubt()})
        ForkServer(driver).serve()
    except OSError:
        # The driver is gone.
        return
