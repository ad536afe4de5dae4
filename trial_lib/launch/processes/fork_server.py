"""The fork server of the warm starter: an interpreter that has imported torch and DeepSpeed, and only forks.

It must stay fit to fork (see `priming`). It checks that before each fork.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from trial_lib.launch.processes import asked_device, channel, config_check, rank_process
from trial_lib.launch.processes.guard import Guard, become_guard
from trial_lib.launch.processes.keeper import become_subreaper, kill_descendants
from trial_lib.launch.processes.priming import doubt, import_all, prime
from trial_lib.messages.orders import Import

_HOUSEKEEPING_S = 0.5
_GUARDS_S = 2.0
# This program waits for the end of one child, and reaps the others.
_WAIT = "import os, sys\nwhile os.wait()[0] != int(sys.argv[1]): pass"
_STANDARD_STREAMS = 2
# If more modules than these make forks unsafe, all of the code's imports are left to the ranks.
_MOST_LEFT_OUT = 5
# What a spoilt server tells the fork that takes over, in the place of a module's name.
_TOO_LONG = "*"
_LEAST_S = 0.001


class ForkServer:
    """Answers the driver: `{"launch": request}` with a socket for the trial's guard, `{"prime": imports}`, or
    `{"check": request}` (see `config_check`).
    """

    def __init__(self, driver: socket.socket) -> None:
        self._driver = driver
        self._guards: set[int] = set()
        self._left_out: set[str] = set()

    def serve(self) -> None:
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
                self.import_safely(message["prime"], set(message.get("without", ())))
                channel.send(self._driver, {"primed": True})
            elif config_check.CHECK in message:
                config_check.answer(self._driver, message[config_check.CHECK], doubt() is None)
            else:
                self._launch(message["launch"], descriptors)

    def import_safely(self, imported: Sequence[Import], without: set[str], patience_s: float = 0.0) -> None:
        """Imports modules while a fork stands by. If a module makes forks unsafe, the fork takes over.

        The fork leaves out the module that spoilt its parent. If too many modules do so, or if the imports take too
        long, it leaves out all of them.
        """
        ends_at = time.monotonic() + patience_s
        before = len(self._left_out)
        takes_too_long = False
        while True:
            # The fork that stands by waits for a word on the pipe. Without one it ends with this process's imports.
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
                takes_too_long = told == _TOO_LONG
                self._left_out |= set() if takes_too_long else {told}
                continue
            os.close(listen)

            def hand_over(told: str, to: int = reserve, pipe: int = tell) -> None:
                os.write(pipe, told.encode())
                self._stand_aside(to)

            leaves_all = takes_too_long or len(self._left_out) > _MOST_LEFT_OUT
            with _importing(), _in_time(ends_at if patience_s and not leaves_all else None, hand_over):
                spoilt_by = None if leaves_all else import_all(imported, self._left_out | without)
            if spoilt_by:
                hand_over(spoilt_by)
            os.close(tell)
            os.waitpid(reserve, 0)
            break
        if takes_too_long:
            self._note(f"the code's imports took more than {patience_s:g} s: they are left to the ranks")
        elif len(self._left_out) > before:
            names = ", ".join(sorted(self._left_out))
            what = "all of the code's imports" if len(self._left_out) > _MOST_LEFT_OUT else "what imports them"
            self._note(f"the fork server could not fork with {names}: these and {what} are paid in each trial")

    def _stand_aside(self, successor: int) -> None:
        # Waits for the end of the fork that serves from now on, as a program without this one's imports. The process
        # stays the same, because the successor is its child. Memory of a GPU that the imports took is freed.
        self._driver.close()
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers alone
            # The log stays open. The files of a GPU's driver may be inheritable, so they are closed here.
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
        # Reaps ended trials, and kills what a killed keeper has left. The server is the next subreaper above.
        has_ended = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                has_ended = True
                self._guards.discard(pid)
        if not has_ended:
            # Nothing was left. A look through all processes of the host would take time from the ranks' cores.
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
                asked_device.make_up()
                rank_process.become(request, rank, guard)
            finally:
                # The exit must not unwind the frames of the guard that it was forked from.
                os._exit(1)
        return pid

    try:
        Guard(driver, request, start_rank).supervise()
    finally:
        os._exit(1)


def _keep(driver: socket.socket, server: int) -> None:
    # Stays behind as the server's parent. If the driver dies, also during a build, it ends everything below.
    poll = select.poll()
    poll.register(driver, 0)
    while os.waitpid(server, os.WNOHANG)[0] == 0:
        if poll.poll(_HOUSEKEEPING_S * 1000):
            # The guards have noticed it too, and clean up after their trials.
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
            _wait_for_children(_GUARDS_S)
            kill_descendants()
            return
    # The server was killed. Running trials have guards of their own, and sockets to the driver.
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
def _in_time(ends_at: float | None, hand_over: Callable[[str], None]) -> Iterator[None]:
    # Hands over to the fork that stands by if the imports last beyond `ends_at`, of the monotonic clock.
    if ends_at is None:
        yield
        return

    def is_late(number: int, frame: object) -> None:
        hand_over(_TOO_LONG)

    before = signal.signal(signal.SIGALRM, is_late)
    signal.setitimer(signal.ITIMER_REAL, max(_LEAST_S, ends_at - time.monotonic()))
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is is_late:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    # Spares imports the garbage collector's passes, which are a fifth of their time, and freezes their objects. The few
    # objects among them that are garbage are frozen too. A last pass to find them would delay the first trial.
    thresholds = gc.get_threshold()
    # `gc.disable` is not used here, because an imported library may call it for its program.
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*thresholds)


def main(arguments: list[str]) -> None:
    """Entry: primes the server, reports that, and serves."""
    driver = socket.socket(fileno=int(arguments[0]))
    # The driver handles the terminal's Ctrl-C.
    os.setsid()
    become_subreaper()
    rank_process.go_on_without_parent(os.getppid())
    server = os.fork()
    if server:
        _keep(driver, server)
        return
    rank_process.die_with_parent(os.getppid())
    become_subreaper()
    try:
        ahead = json.loads(arguments[1])
        with _importing():
            loaded = prime(driver, arguments[2:])
        serving = ForkServer(driver)
        if ahead["imports"] and doubt() is None:
            serving.import_safely(ahead["imports"], set(ahead["without"]), ahead["patience_s"])
        channel.send(driver, {"ready": True, "doubt": doubt(), "loaded": loaded})
        serving.serve()
    except OSError:
        # The driver is gone.
        return
