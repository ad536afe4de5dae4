"""The guards: each starts processes, waits for them, applies a deadline, and leaves none of them alive.

A trial's guard is the parent of its ranks. A warm one is a fork of the primed server, a cold one a small process of its
own. The guard of a trial over several hosts is the parent of a process for each host (ssh, mostly), which runs that
host's part of the trial under a guard of its own. A build of DeepSpeed's ops has one, too. Each has a watchdog.

The guards of a host's part and of a build run on every host, in the user's environment. Their standard input is their
tie. They end when it closes, with the connection or with the process that holds it.
"""

import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerotune.trial_lib.launch.processes import bootstrap, channel, layer_mount
from zerotune.trial_lib.launch.processes.rank_process import WORKERS_OF
from zerotune.trial_lib.launch.processes.watchdog import (
    LOGS_LOOK_S,
    LOOK_S,
    STOPPED_LOOKS,
    Ended,
    StoppedLooks,
    bound_logs,
    clean_up_after,
    is_stopped,
    kill_descendants,
    leave_watchdog,
    logs_of,
    note_segments_before,
    remove_shared_memory,
    scratch_of,
    wait_while_tied,
    workers_folder,
)
from zerotune.trial_lib.messages import build_times, folders, shared_segments
from zerotune.trial_lib.messages.files import open_own
from zerotune.trial_lib.messages.folders import Layer

# What a guard supervises: the ranks of a trial on one host, the hosts of a trial, one host's part, a build of ops.
RANKS_OF_TRIAL, HOSTS_OF_TRIAL, HOST_PART, BUILD = "trial", "hosts", "host-part", "build"

_CANCELLED_POLL_S = 0.05

# The causes of the end of a trial's processes.
RANKS, DEADLINE, CANCEL = "ranks", "deadline", "cancel"
# A rank was stopped, as by SIGSTOP, or has replaced its program by another one.
STOPPED, REPLACED = "stopped", "replaced"


def command(interpreter: str, supervised: str, *arguments: str) -> list[str]:
    return bootstrap.command(interpreter, __name__, supervised, *arguments)


# The guard of a trial.


def become_guard(request: dict[str, Any], driver: socket.socket) -> None:
    """Goes on as a fork, which is to become a guard. This process stays behind as its watchdog.

    A stopped guard guards nothing. The watchdog kills it when the driver ends the trial, or when the guard stays
    stopped. The driver gets the watchdog's process id, and wakes a stopped watchdog.

    The watchdog holds the slots and the driver's socket, as the guard does. A GPU's driver may take seconds to free the
    last rank. Until then no other trial gets the slots, and the trial has not ended for the driver.
    """
    note_segments_before(request)
    layer_mount.name_elsewhere(request)
    # Before the fork, because two processes must not write to the socket.
    with contextlib.suppress(OSError):
        channel.send(driver, {channel.WATCHDOG: os.getpid()})
    was_cancelled = False

    def wait(guard: int) -> int:
        nonlocal was_cancelled
        status, was_cancelled = _keep(guard, driver)
        return status

    def clean_up(guard: Ended) -> int:
        left = clean_up_after(request, guard.pid, guard.held, guard.pids) if guard.status else {}
        bound_logs(_bounded_logs(request))
        for place in layer_mount.elsewhere(request):
            with contextlib.suppress(OSError):
                place.rmdir()
        if was_cancelled:
            with contextlib.suppress(OSError):
                statuses = [None] * len(request["ranks"])
                channel.send(driver, {"ended_by": CANCEL, "statuses": statuses, "shared_memory": left})
        return 0

    leave_watchdog(clean_up, wait)


def _keep(guard: int, driver: socket.socket) -> tuple[int, bool]:
    # Waits for a guard's end, and kills a stopped guard. Returns whether the driver had ended the trial, too.
    waking = select.poll()
    waking.register(driver, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # an older kernel, or Python, does not have it
        waking.register(os.pidfd_open(guard), select.POLLIN)
    stopped, was_cancelled = StoppedLooks(), False
    while True:
        woken = waking.poll(LOOK_S * 1000)
        pid, status = os.waitpid(guard, os.WNOHANG)
        if pid:
            return status, was_cancelled
        is_cancelled = any(descriptor == driver.fileno() for descriptor, _ in woken)
        if stopped.are_stopped([guard]) and (is_cancelled or stopped.stay_stopped):
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
        bound_logs(self._logs)
        left = clean_up_after(self._request, os.getpid(), held, {*pids, *ranks})
        # The driver may have died.
        with contextlib.suppress(OSError):
            channel.send(
                self._driver,
                {
                    "ended_by": ended_by,
                    "statuses": [self._statuses.get(rank) for rank in range(len(ranks))],
                    "shared_memory": left,
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
                look_at = now + LOOK_S
                if ended_by := self._look(ranks):
                    return ended_by
            if now >= bound_at:
                bound_logs(self._logs)
                bound_at = now + LOGS_LOOK_S if self._logs else float("inf")
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
                STOPPED: _stopped_by(pid) if is_stopped(pid) else "",
                REPLACED: "" if self._is_own(pid) else _command_of(pid),
            }
            for cause, words in seen.items():
                looks = self._looks[cause, rank] = self._looks.get((cause, rank), 0) + 1 if words else 0
                if looks > STOPPED_LOOKS:
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
    return [] if of_others else logs_of(request)


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


def _serve(descriptor: int, start: Callable[[dict[str, Any], dict[str, Any]], "subprocess.Popen[bytes]"]) -> None:
    # Guards one trial that the driver sends over a socket. `start` gets a process's part, and the whole launch.
    driver = socket.socket(fileno=descriptor)
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


# The guard reaps its children itself. A collected Popen object would warn about its child, and close its pipe.
_unwaited: list[subprocess.Popen[bytes]] = []


def _start_interpreter(own: dict[str, Any], request: dict[str, Any]) -> "subprocess.Popen[bytes]":
    # Starts a rank as a fresh interpreter.
    rank = bootstrap.command(
        request["interpreter"], "zerotune.trial_lib.launch.processes.rank_process", str(request["rank"])
    )
    process = _start_logged(rank, own["log"], json.dumps(request), own["environment"])
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return process


def _start_host(part: dict[str, Any], request: dict[str, Any]) -> "subprocess.Popen[bytes]":
    # Starts one host's part. Each "rank" of a trial over several hosts is such a part. Its standard input stays open.
    # This number names the folder of the ranks' workers. This guard removes it here, a part's guard elsewhere.
    order = {**part["order"], "guard": os.getpid() if part["here"] else None}
    return _start_logged(part["command"], part["log"], json.dumps(order) + "\n")


def _start_logged(
    words: list[str], log: str, order: str, environment: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    # An interpreter that fails to start, or ssh, prints the reason to the log.
    with open_own(Path(log), "ab") as output:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment)
    assert process.stdin is not None
    # If the process has ended, its exit status shows why.
    with contextlib.suppress(BrokenPipeError):
        # Every user of the host can read a command line, so the order goes through the pipe.
        process.stdin.write(order.encode())
        process.stdin.flush()
    return process


# The guards that are tied to a process on this host or another.


def _run_tied(process: "subprocess.Popen[bytes]", meanwhile: Callable[[], None] = lambda: None) -> int | None:
    # The status of a process; None if the tie has closed first. Nothing that it has started is left.
    status = wait_while_tied(process, sys.stdin.fileno(), meanwhile)
    kill_descendants()
    return status


RANKS_ENDED, RANK_FAILED, LOST = 0, 1, 2
"""The exit codes of a host's part: all its ranks have ended well, one has failed, or the guard itself was killed. Any
other status, or a signal, means that the host is gone.
"""


def _guard_host_part(order: dict[str, Any]) -> None:
    # Runs DeepSpeed's launcher on this host, for the ranks of a trial over several.
    segments = shared_segments.segments()

    def clean_up(guard: Ended) -> int:
        remove_shared_memory(order["master_addr"], order["master_port"], segments)
        if order["scratch"]:
            folders.remove(Path(order["scratch"]))
        if order["guard"] is None:
            shutil.rmtree(workers_folder(order["environment"], os.getpid()), ignore_errors=True)
        code = os.waitstatus_to_exitcode(guard.status)
        return code if code in (RANKS_ENDED, RANK_FAILED) else LOST

    leave_watchdog(clean_up)
    environment = {**order["environment"], WORKERS_OF: str(order["guard"] or os.getppid())}
    rank = bootstrap.command(order["interpreter"], "zerotune.trial_lib.launch.processes.rank_process", order["launch"])
    words = [
        *(order["interpreter"], "-m", "deepspeed.launcher.runner"),
        *("--hostfile", order["hostfile"], "--no_ssh", "--node_rank", str(order["node_rank"])),
        *("--master_addr", order["master_addr"], "--master_port", order["master_port"]),
        *("--log_level", "critical", "--no_local_rank", "--no_python"),
        *rank,
    ]
    # A launcher that fails to start prints the reason to the log of the host's first rank.
    with open_own(Path(order["log"]), "ab") as log:
        launcher = subprocess.Popen(
            words, cwd=order["cwd"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    logs = [Path(log) for log in order["bounded_logs"]]
    status = _run_tied(launcher, lambda: bound_logs(logs))
    bound_logs(logs)
    os._exit(RANKS_ENDED if status == 0 else RANK_FAILED)


# The profile trial may run meanwhile. Its ranks need little of the processor, but without delay.
_NICE = 10


def _guard_build(order: dict[str, Any]) -> None:
    # Builds DeepSpeed's ops. The standard output has the report of `jit_builds`.
    # The driver handles the terminal's Ctrl-C. A process that ssh starts may lead a session already.
    with contextlib.suppress(PermissionError):
        os.setsid()
    leave_watchdog(lambda _: 0)
    os.nice(_NICE)
    report = os.dup(1)
    builds = "zerotune.trial_lib.launch.processes.jit_builds"
    building = subprocess.Popen(
        bootstrap.command(order["interpreter"], builds, "--report", str(report), *order["builders"]),
        pass_fds=[report],
        env=order["environment"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _run_tied(building)
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Entry of all guards but warm ones. A trial's guard reads its order from a socket, the others read one line."""
    match arguments:
        case [supervised, descriptor]:
            _serve(int(descriptor), _start_interpreter if supervised == RANKS_OF_TRIAL else _start_host)
        case [supervised]:
            order = json.loads(sys.stdin.buffer.readline())
            _guard_host_part(order) if supervised == HOST_PART else _guard_build(order)
