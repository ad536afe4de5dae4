"""The guard of one trial: starts its ranks, waits for them, applies the deadline, and leaves no process alive.

A warm guard is a fork of the primed server, a cold one a small process of its own.
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

from trial_lib.launch.processes import bootstrap, channel, layer_mount, log_bounds, rank_process
from trial_lib.launch.processes.keeper import Kept, kill_descendants, leave_keeper
from trial_lib.launch.processes.leavings import look_before, remove_leavings, scratch_of
from trial_lib.messages import build_times
from trial_lib.messages.files import open_own
from trial_lib.messages.folders import Layer

_LOOK_S = 2.0
_STOPPED_LOOKS = 5
_CANCELLED_POLL_S = 0.05

# The causes of the end of a trial's processes.
RANKS, DEADLINE, CANCEL = "ranks", "deadline", "cancel"
# A rank was stopped, as by SIGSTOP, or has replaced its program by another one.
STOPPED, REPLACED = "stopped", "replaced"

# A scheduler that suspends a job stops all its processes, and wakes them one after another.
_LOOKS = 5


def become_guard(request: dict[str, Any], driver: socket.socket) -> None:
    """Goes on as a fork, which is to become a guard. This process stays behind as the guard's keeper.

    A stopped guard guards nothing. The keeper kills it when the driver ends the trial, or when the guard stays stopped.
    The driver gets the keeper's process id, and wakes a stopped keeper.

    The keeper holds the slots and the driver's socket, as the guard does. A GPU's driver may take seconds to free the
    last rank. Until then no other trial gets the slots, and the trial has not ended for the driver.
    """
    look_before(request)
    layer_mount.name_elsewhere(request)
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
        log_bounds.bound(_bounded_logs(request))
        for place in layer_mount.elsewhere(request):
            with contextlib.suppress(OSError):
                place.rmdir()
        if was_cancelled:
            with contextlib.suppress(OSError):
                statuses = [None] * len(request["ranks"])
                channel.send(driver, {"ended_by": CANCEL, "statuses": statuses, channel.LEAVINGS: left})
        return 0

    leave_keeper(clean_up, wait)


def _keep(guard: int, driver: socket.socket) -> tuple[int, bool]:
    # Waits for a guard's end, and kills a stopped guard. Returns whether the driver had ended the trial, too.
    waking = select.poll()
    waking.register(driver, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # an older kernel, or Python, does not have it
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
    """Supervises the ranks of one trial. When the driver's end of the socket closes, it ends all its processes."""

    def __init__(self, driver: socket.socket, request: dict[str, Any], start_rank: Callable[[int], int]) -> None:
        self._driver = driver
        self._request = request
        self._start_rank = start_rank
        self._statuses: dict[int, int] = {}
        self._looks: dict[tuple[str, int], int] = {}
        self._lost: dict[str, Any] = {}
        self._logs: list[Path] = []

    def supervise(self) -> None:
        """Runs the ranks to their end and sends the driver their statuses. It does not return."""
        os.setsid()
        deadline = time.monotonic() + self._request["deadline_s"]
        # A trial over several hosts has no layer, because ranks with a hostfile have to find each other's files.
        if layer := self._request.get("layer"):
            layer_mount.enter(Layer(**layer), self._request)
        # The layer has changed their paths.
        self._logs = _bounded_logs(self._request)
        ranks = {self._start_rank(rank): rank for rank in range(len(self._request["ranks"]))}
        ended_by = self._wait(ranks, deadline)
        held, pids = kill_descendants()
        log_bounds.bound(self._logs)
        left = remove_leavings(self._request, os.getpid(), held, {*pids, *ranks})
        # The driver may have died.
        with contextlib.suppress(OSError):
            channel.send(
                self._driver,
                {
                    "ended_by": ended_by,
                    "statuses": [self._statuses.get(rank) for rank in range(len(ranks))],
                    channel.LEAVINGS: left,
                    **self._lost,
                },
            )
        os._exit(0)

    def _wait(self, ranks: dict[int, int], deadline: float) -> str:
        # Waits for all ranks, the deadline or the driver.
        first_deadline, grace_ends, look_at, bound_at = deadline, float("inf"), 0.0, 0.0
        child_ends = _notice_children()
        watched: list[Any] = [self._driver, child_ends]
        while True:
            now = time.monotonic()
            if self._reap(ranks):
                # The peers of a failed rank get a moment to write their own records.
                grace_ends = min(grace_ends, now + self._request["grace_s"])
            if len(self._statuses) == len(ranks):
                return RANKS
            if now >= deadline:
                # Builds by the ranks do not count towards the trial's deadline.
                scratch = scratch_of(self._request["payload"])
                later = first_deadline + (0.0 if scratch is None else build_times.seconds(scratch))
                if now >= later:
                    return DEADLINE
                deadline = later
            if now >= grace_ends:
                return RANKS
            if now >= look_at:
                look_at = now + _LOOK_S
                if ended_by := self._look(ranks):
                    return ended_by
            if now >= bound_at:
                log_bounds.bound(self._logs)
                bound_at = now + log_bounds.LOOK_S if self._logs else float("inf")
            # A full experiment has no deadline.
            next_s = min(deadline, grace_ends, look_at, bound_at) - now
            readable, _, _ = select.select(watched, [], [], max(0.0, next_s))
            if self._driver in readable:
                return CANCEL
            if child_ends in readable:
                os.read(child_ends, 4096)

    def _look(self, ranks: dict[int, int]) -> str:
        # Returns why no rank can bring the trial to an end any more; empty if one can. A rank that stays stopped never
        # ends, and its peers wait for it. One that has executed another program is alive, and measures nothing.
        # The processes of a trial over several hosts are not its ranks, and have another program. A training at full
        # length may be stopped by its user, who lets it go on later.
        if "interpreter" not in self._request or math.isinf(self._request["deadline_s"]):
            return ""
        for pid, rank in ranks.items():
            if rank in self._statuses:
                continue
            seen = {
                STOPPED: _stopped_by(pid) if rank_process.is_stopped(pid) else "",
                REPLACED: "" if self._is_own(pid) else _command_of(pid),
            }
            for cause, words in seen.items():
                looks = self._looks[cause, rank] = self._looks.get((cause, rank), 0) + 1 if words else 0
                if looks > _LOOKS:
                    self._lost = {"rank": rank, "seen": words}
                    return cause
        return ""

    def _is_own(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            program = Path(f"/proc/{pid}/exe").readlink()
            is_python = program.name.startswith("python") or program == Path(self._request["interpreter"]).resolve()
            return is_python or os.getpgid(pid) != pid
        return True

    def _reap(self, ranks: dict[int, int]) -> bool:
        # Records the ranks that have ended, and reaps adopted orphans. Returns whether a rank has failed.
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


def _bounded_logs(request: dict[str, Any]) -> list[Path]:
    # Each host of several bounds the logs of its own ranks.
    of_others = "interpreter" not in request or math.isinf(request["deadline_s"])
    return [] if of_others else log_bounds.logs_of(request)


def _command_of(pid: int) -> str:
    try:
        return " ".join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")).strip()
    except OSError:
        return ""


def _stopped_by(pid: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if seen is not None:
            return signal.Signals(seen.si_status).name
    return "a signal"


def _notice_children() -> int:
    # Returns a descriptor that becomes readable when a child of this process ends. Call it after the children have
    # started. Polling would take time from a rank's core. Its peers would then wait for the rank at the next
    # collective.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # An ignored signal, which is the default, wakes no process.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read_end


def main(arguments: list[str]) -> None:
    """Entry of a cold trial's guard: reads the launch from the driver's socket."""
    serve(arguments, _start_interpreter)


def serve(arguments: list[str], start: Callable[[dict[str, Any], dict[str, Any]], "subprocess.Popen[bytes]"]) -> None:
    """Guards one trial that the driver sends over a socket. `start` gets a process's part, and the whole launch."""
    driver = socket.socket(fileno=int(arguments[0]))
    # The driver handles the terminal's Ctrl-C.
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
    # Starts a rank as a fresh interpreter.
    # An interpreter that fails to start prints the reason to the rank's log.
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


# The guard reaps its children itself. A collected Popen object would warn about its child, and close its pipe.
_unwaited: list[subprocess.Popen[bytes]] = []
