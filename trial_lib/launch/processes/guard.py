"""The guard of one trial: starts its ranks, waits, keeps the deadline, and leaves nothing alive.

Runs in the user's environment, warm as a fork of the primed server, cold as a small process of its own.
"""

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trial_lib.launch.processes import bootstrap, channel, layer_mount, rank_process
from trial_lib.launch.processes.keeper import Kept, kill_descendants, leave_keeper
from trial_lib.launch.processes.leavings import look_before, remove_leavings, scratch_of
from trial_lib.wire import build_times
from trial_lib.wire.layer import Layer
from trial_lib.wire.whole_files import open_own

_LOOK_S = 2.0
_STOPPED_LOOKS = 5
_CANCELLED_POLL_S = 0.05

# What ended a trial's processes.
RANKS, DEADLINE, CANCEL = "ranks", "deadline", "cancel"


def become_guard(request: dict[str, Any], driver: socket.socket) -> None:
    """Goes on as a fork, which is to become a guard; this process stays behind as the guard's keeper.

    A guard that someone has stopped guards nothing. The keeper kills it when the driver wants the trial's end, or when
    it stays stopped. The driver gets the keeper's process id, and wakes a stopped keeper.

    The keeper holds the slots and the driver's socket, as the guard does. A GPU's driver may take seconds to free the
    last rank. Until then nobody else is given the slots, and the driver does not take the trial for ended.

    Args:
        request: the launch, as `trial_lib.launch.rank_starter.LaunchRequest` describes it.
        driver: the socket to it.
    """
    look_before(request)
    # Before the fork, because two processes must not write to the socket.
    with contextlib.suppress(OSError):
        channel.send(driver, {channel.KEEPER: os.getpid()})
    was_cancelled = False

    def wait(guard: int) -> int:
        nonlocal was_cancelled
        status, was_cancelled = _keep(guard, driver)
        return status

    def clean_up(guard: Kept) -> int:
        left = remove_leavings(request, guard.pid, guard.held, guard.pids) if guard.status else {}
        if was_cancelled:
            with contextlib.suppress(OSError):
                statuses = [None] * len(request["ranks"])
                channel.send(driver, {"ended_by": CANCEL, "statuses": statuses, channel.LEAVINGS: left})
        return 0

    leave_keeper(clean_up, wait)


def _keep(guard: int, driver: socket.socket) -> tuple[int, bool]:
    """Waits for a guard's end, and kills one that is stopped.

    Returns:
        The guard's status, and whether it was killed because the driver wanted the trial's end.
    """
    waking = select.poll()
    waking.register(driver, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python on it, that has none
        waking.register(os.pidfd_open(guard), select.POLLIN)
    stopped_looks, was_cancelled = 0, False
    while True:
        woken = waking.poll(_LOOK_S * 1000)
        pid, status = os.waitpid(guard, os.WNOHANG)
        if pid:
            return status, was_cancelled
        is_cancelled = any(descriptor == driver.fileno() for descriptor, _ in woken)
        is_stopped = rank_process.is_stopped(guard)
        stopped_looks = stopped_looks + 1 if is_stopped else 0
        if is_stopped and (is_cancelled or stopped_looks > _STOPPED_LOOKS):
            was_cancelled = is_cancelled
            os.kill(guard, signal.SIGKILL)
        if is_cancelled:
            time.sleep(_CANCELLED_POLL_S)


class Guard:
    """Supervises the ranks of one trial.

    Args:
        driver: the socket to the driver. When its other end closes, everything here ends.
        request: the launch, as `trial_lib.launch.rank_starter.LaunchRequest` describes it.
        start_rank: starts a rank and returns its process id.
    """

    def __init__(self, driver: socket.socket, request: dict[str, Any], start_rank: Callable[[int], int]) -> None:
        self._driver = driver
        self._request = request
        self._start_rank = start_rank
        self._statuses: dict[int, int] = {}

    def supervise(self) -> None:
        """Runs the ranks to their end and tells the driver how they ended; does not return."""
        os.setsid()
        deadline = time.monotonic() + self._request["deadline_s"]
        # A trial over several hosts has none: its ranks have to find each other's files.
        if layer := self._request.get("layer"):
            layer_mount.enter(Layer(**layer))
        ranks = {self._start_rank(rank): rank for rank in range(len(self._request["ranks"]))}
        ended_by = self._wait(ranks, deadline)
        held, pids = kill_descendants()
        left = remove_leavings(self._request, os.getpid(), held, {*pids, *ranks})
        # A driver that has died cannot be told.
        with contextlib.suppress(OSError):
            channel.send(
                self._driver,
                {
                    "ended_by": ended_by,
                    "statuses": [self._statuses.get(rank) for rank in range(len(ranks))],
                    channel.LEAVINGS: left,
                },
            )
        os._exit(0)

    def _wait(self, ranks: dict[int, int], deadline: float) -> str:
        """Waits for all ranks, the deadline or the driver."""
        first_deadline, grace_ends = deadline, float("inf")
        child_ends = _notice_children()
        watched: list[Any] = [self._driver, child_ends]
        while True:
            now = time.monotonic()
            if self._reap(ranks):
                # The peers of a failed rank get a moment to leave records of their own.
                grace_ends = min(grace_ends, now + self._request["grace_s"])
            if len(self._statuses) == len(ranks):
                return RANKS
            if now >= deadline:
                # What ranks build meanwhile is not their trial's time.
                later = first_deadline + self._build_seconds()
                if now >= later:
                    return DEADLINE
                deadline = later
            if now >= grace_ends:
                return RANKS
            left = min(deadline, grace_ends) - now
            # A full experiment has no deadline.
            readable, _, _ = select.select(watched, [], [], left if math.isfinite(left) else None)
            if self._driver in readable:
                return CANCEL
            if child_ends in readable:
                os.read(child_ends, 4096)

    def _build_seconds(self) -> float:
        scratch = scratch_of(self._request["payload"])
        return 0.0 if scratch is None else build_times.seconds(scratch)

    def _reap(self, ranks: dict[int, int]) -> bool:
        """Notes the ranks that have ended, and lets adopted orphans go; returns whether a rank has failed."""
        failed = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in ranks:
                    self._statuses[ranks[pid]] = os.waitstatus_to_exitcode(status)
                    failed = failed or status != 0
        return failed


def _notice_children() -> int:
    """Returns a descriptor that becomes readable when a child of this process ends; to be called after they started.

    To look again and again instead takes a rank's core from it, and its peers wait for it at the next collective.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # A signal that is ignored, as by default, wakes nobody.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read_end


def main(arguments: list[str]) -> None:
    """Entry of a cold trial's guard: reads the launch from the driver's socket."""
    serve(arguments, _start_interpreter)


def serve(arguments: list[str], start: Callable[[dict[str, Any], dict[str, Any]], "subprocess.Popen[bytes]"]) -> None:
    """Guards one trial that the driver sends over a socket.

    Args:
        arguments: the socket's descriptor.
        start: starts one of the launch's processes, given that one's part of the launch and the whole.
    """
    driver = socket.socket(fileno=int(arguments[0]))
    # The terminal's Ctrl-C is the driver's to hear.
    os.setsid()
    received = channel.receive(driver)
    if received is None:
        return
    request = received[0]
    become_guard(request, driver)

    def start_rank(rank: int) -> int:
        process = start(request["ranks"][rank], {**request, "rank": rank})
        _unwaited.append(process)
        return process.pid

    Guard(driver, request, start_rank).supervise()


def _start_interpreter(own: dict[str, Any], request: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Starts a rank as a fresh interpreter."""
    # An interpreter that does not come up says why in the rank's log.
    with open_own(Path(own["log"]), "ab") as log:
        process = subprocess.Popen(
            bootstrap.command(request["interpreter"], "trial_lib.launch.processes.rank_process", str(request["rank"])),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=own["environment"],
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    return process


# The guard reaps by itself; a Popen object that is collected would warn about its child, and close its pipe.
_unwaited: list[subprocess.Popen[bytes]] = []
