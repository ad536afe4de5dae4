"""The fork server of the warm launcher: an interpreter that has imported torch and DeepSpeed, and only forks.

Runs in the user's environment. It must stay single-threaded and without a CUDA context: a fork of anything else hangs,
so it checks before each one.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from trial_lib.launch import channel, jit_builds, rank_process
from trial_lib.launch.guard import Guard, become_subreaper, kill_descendants

_HOUSEKEEPING_S = 0.5
_GUARDS_S = 2.0


def prime(driver: socket.socket, builders: list[str]) -> None:
    """Imports what every DeepSpeed training imports, and what a first step would otherwise load later."""
    # DeepSpeed imports mlflow where it is installed, and with it pyarrow, which starts a thread.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    import deepspeed  # noqa: F401 - for the forks
    import torch

    del sys.modules["mlflow"]
    importlib.import_module("deepspeed.ops").__compatible_ops__  # noqa: B018 - computed on first use
    with contextlib.suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))])
    from deepspeed.accelerator import get_accelerator

    def note(text: str) -> None:
        channel.send(driver, {"note": text})

    if get_accelerator().device_name() == "cpu":
        jit_builds.build(builders, note)
        return
    # The ranks load the ops themselves.
    jit_builds.wait_for_the_living()
    # Loading a CUDA op asks the device for its architecture, and with that makes a context: in a child, then.
    child = os.fork()
    if child == 0:
        try:
            jit_builds.build(builders, note)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def prime_with(modules: list[str]) -> None:
    """Imports what the profile trial had imported, in its order; one that fails here is left to the ranks."""
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def doubt() -> str | None:
    """Returns why a fork is not safe now, or None."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        return f"the fork server has {threads} threads"
    # Opened by the CUDA driver's initialisation, by whichever library; a child of such a process cannot use CUDA.
    if any(link.startswith("/dev/nvidia-uvm") for link in _open_files()):
        return "the fork server has a CUDA context"
    return None


def _open_files() -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(descriptor.readlink()))
    return links


class ForkServer:
    """Answers the driver: `{"launch": request}` with a socket for the trial's guard, or `{"prime": modules}`."""

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
                prime_with(message["prime"])
                gc.collect()
                gc.freeze()
                channel.send(self._driver, {"primed": True, "doubt": doubt()})
            else:
                self._launch(message["launch"], descriptors[0])

    def _launch(self, request: dict[str, Any], descriptor: int) -> None:
        reason = doubt()
        if reason is None:
            pid = os.fork()
            if pid == 0:
                self._driver.close()
                _become_guard(request, socket.socket(fileno=descriptor))
            self._guards.add(pid)
        os.close(descriptor)
        channel.send(self._driver, {"doubt": reason})

    def _reap(self) -> None:
        """Lets ended guards go, and kills what a killed guard left: the server is the next subreaper above it."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self._guards.discard(pid)
        for child in psutil.Process().children():
            if child.pid not in self._guards:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def _become_guard(request: dict[str, Any], driver: socket.socket) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    guard = os.getpid()

    def start_rank(rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            driver.close()
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


def main(arguments: list[str]) -> None:
    """Entry: primes, says so, serves.

    Args:
        arguments: the descriptor of the driver's socket, then the DeepSpeed ops to build and load.
    """
    driver = socket.socket(fileno=int(arguments[0]))
    # The terminal's Ctrl-C is the driver's to hear.
    os.setsid()
    become_subreaper()
    server = os.fork()
    if server:
        _keep(driver, server)
        return
    rank_process.die_with_parent(os.getppid())
    become_subreaper()
    try:
        prime(driver, arguments[1:])
        gc.collect()
        gc.freeze()
        channel.send(driver, {"ready": True, "doubt": doubt()})
        ForkServer(driver).serve()
    except OSError:
        # The driver is gone.
        return
