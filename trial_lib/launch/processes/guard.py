"""The guard of one trial: starts its ranks, waits, keeps the deadline, and leaves nothing alive.

Runs in the user's environment, warm as a fork of the primed server, cold as a small process of its own.
"""

import contextlib
import ctypes
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

import psutil

from trial_lib.launch.processes import bootstrap, channel, layer_mount, rank_process
from trial_lib.launch.processes.leavings import look_before, remove_leavings, scratch_of
from trial_lib.wire import build_times
from trial_lib.wire.layer import Layer
from trial_lib.wire.shared_segments import held_by
from trial_lib.wire.whole_files import open_own

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01
_STUCK_S = 30.0
_MEMORY_LOOK_S = 1.0
_SHARE_OF_MEMORY = 1e-3  # that has to come free at least, of all that the host has
_LOOK_S = 2.0
_STOPPED_LOOKS = 5
_CANCELLED_POLL_S = 0.05

# What ended a trial's processes.
RANKS, DEADLINE, CANCEL = "ranks", "deadline", "cancel"


def become_subreaper() -> None:
    """Makes orphans among this process's descendants its children, also those in sessions of their own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> tuple[set[str], set[int]]:
    """Kills every descendant of this process and waits until none is left, or the rest do not get on.

    Returns:
        The segments of shared memory that they had, and their process ids.
    """
    patience = _Patience()
    held, pids = set[str](), set[int]()
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


class _Patience:
    """Says when killed processes are not worth waiting for: for half a minute none has ended, and no memory come free.

    A killed process lives on while a driver gives back what it has locked for it: some gigabytes of the host's memory a
    second, of hundreds. One that is stuck in a driver dies when that lets it, if ever.
    """

    def __init__(self) -> None:
        self._fewest: float = math.inf
        memory = psutil.virtual_memory()
        self._most_free, self._step = memory.available, memory.total * _SHARE_OF_MEMORY
        self._since = self._looked_at = time.monotonic()

    def note(self, processes: int) -> None:
        """Notes how many are left."""
        now = time.monotonic()
        if processes < self._fewest:
            self._fewest, self._since = processes, now
        if now - self._looked_at >= _MEMORY_LOOK_S:
            self._looked_at = now
            if (free := psutil.virtual_memory().available) >= self._most_free + self._step:
                # More than ever: what others take and give back meanwhile comes to an end.
                self._most_free, self._since = free, now

    def is_over(self) -> bool:
        """Returns whether nothing has got on for as long."""
        return time.monotonic() - self._since > _STUCK_S


def leave_keeper(request: dict[str, Any], driver: socket.socket) -> None:
    """Goes on as a fork, which is to become a guard; this process stays behind as the guard's parent, its keeper.

    When the guard is killed, what its ranks have started in sessions of their own comes here. A guard that is stopped
    guards nothing: it is killed when the driver wants the trial's end, and when it stays so. The driver is told of the
    keeper, and wakes one that is stopped. The keeper has what the guard has, the slots and the end of the driver's
    socket: before the last rank is gone, which may take a GPU's driver seconds, nobody else is given the slots, and the
    driver does not take the trial for ended.

    Args:
        request: the launch, as `trial_lib.launch.rank_starter.LaunchRequest` describes it.
        driver: the socket to it.
    """
    become_subreaper()
    rank_process.go_on_without_parent(os.getppid())
    look_before(request)
    keeper = os.getpid()
    # Before there are two that write.
    with contextlib.suppress(OSError):
        channel.send(driver, {channel.KEEPER: keeper})
    guard = os.fork()
    if guard:
        status, was_cancelled = _keep(guard, driver)
        held = kill_descendants()
        left = remove_leavings(request, guard, *held) if status else {}
        if was_cancelled:
            with contextlib.suppress(OSError):
                statuses = [None] * len(request["ranks"])
                channel.send(driver, {"ended_by": CANCEL, "statuses": statuses, channel.LEAVINGS: left})
        os._exit(0)
    rank_process.die_with_parent(keeper)


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
        become_subreaper()
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
    leave_keeper(request, driver)

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
