"""Ends processes with all that they have started, and removes what these leave behind.

    driver ── watchdog ── guard ── ranks and all that they start

A watchdog is the parent that a guard leaves behind. Both are subreapers. An orphan of the ranks becomes a child of the
guard. If the guard is killed, its children become children of the watchdog, which kills them. Four processes have a
watchdog: the guard of a trial, one host's part of a trial, a build of DeepSpeed's ops (see `supervisor`), and the
holder of a tied process, which is a command that ends with the process that started it.
"""

import contextlib
import ctypes
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from zerotune.trial_lib.launch.processes import bootstrap
from zerotune.trial_lib.messages import folders, shared_segments
from zerotune.trial_lib.messages.files import open_own

# What a process asks of the kernel for the time after its parent, and what the kernel shows of a stopped process.

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

LOOK_S = 2.0  # seconds between two looks at processes that may have been stopped
# A scheduler that suspends a job stops all its processes, and wakes them one after another.
STOPPED_LOOKS = 5


def become_subreaper() -> None:
    """Makes orphans among this process's descendants its children, also those in sessions of their own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends. A parent that has already ended counts too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def go_on_without_parent(parent: int) -> None:
    """Makes the kernel wake this process, if it is stopped, when its parent ends. It then cleans up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def wake(pid: int) -> None:
    """Wakes a stopped process; does nothing to any other."""
    if is_stopped(pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


class StoppedLooks:
    """Whether processes stay stopped (SIGSTOP): they were seen so at every look for a while, one each `LOOK_S`."""

    def __init__(self) -> None:
        self._looks = 0

    def are_stopped(self, pids: Iterable[int]) -> bool:
        self._looks = self._looks + 1 if any(map(is_stopped, pids)) else 0
        return self._looks > 0

    @property
    def stay_stopped(self) -> bool:
        return self._looks > STOPPED_LOOKS


# The end of a process with all its descendants.

_POLL_S = 0.01
_STUCK_S = 30.0
_MEMORY_LOOK_S = 1.0
_SHARE_OF_MEMORY = 1e-3


def kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_descendants() -> tuple[set[str], set[int]]:
    """Kills every descendant of this process and waits until none is left, or the rest make no progress.

    Returns the segments of shared memory that they had mapped, and their process ids.
    """
    held, pids = set[str](), set[int]()
    if not _has_children():
        # Usually nothing is left, and a look through all processes of the host takes longer.
        return held, pids
    patience = _Patience()
    while not patience.is_over():
        descendants = psutil.Process().children(recursive=True)
        held |= shared_segments.held_by(process.pid for process in descendants if process.pid not in pids)
        pids.update(process.pid for process in descendants)
        patience.note(len(descendants))
        kill_all(descendants)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(_POLL_S)
    return held, pids


def _has_children() -> bool:
    # Whether this process has a child, running or not yet reaped. Without one it has no descendants.
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class _Patience:
    """Decides when to stop waiting for killed processes: for a while, none has ended and no memory has come free.

    A killed process lives on while a driver unlocks its memory, at some gigabytes of the host's memory a second. A
    process that is stuck in a driver dies when the driver lets it, if ever.
    """

    def __init__(self) -> None:
        self._fewest: float = math.inf
        memory = psutil.virtual_memory()
        self._most_free, self._step = memory.available, memory.total * _SHARE_OF_MEMORY
        self._since = self._looked_at = time.monotonic()

    def note(self, processes: int) -> None:
        now = time.monotonic()
        if processes < self._fewest:
            self._fewest, self._since = processes, now
        if now - self._looked_at >= _MEMORY_LOOK_S:
            self._looked_at = now
            if (free := psutil.virtual_memory().available) >= self._most_free + self._step:
                # A new maximum counts, not any increase: other processes take memory and give it back meanwhile.
                self._most_free, self._since = free, now

    def is_over(self) -> bool:
        return time.monotonic() - self._since > _STUCK_S


# What the ended processes of a trial have left outside of its folder.

REMOVED, LEFT = "removed", "left"
"""Shared memory of the trial was removed. Shared memory that may be another program's was left."""

_BEFORE = "segments"
# torch puts the number of the process into a segment's name.
_OF_TORCH = re.compile(r"torch_(\d+)_")


def note_segments_before(request: dict[str, Any]) -> None:
    request[_BEFORE] = shared_segments.segments()


def clean_up_after(
    request: dict[str, Any], guard: int, held: Collection[str] = (), pids: Collection[int] = ()
) -> dict[str, dict[str, int]]:
    """Removes what the processes of a trial have left.

    Returns the bytes of each segment that was removed, and of each new segment that no process has and that was left.
    """
    environment = request["ranks"][0]["environment"]
    before = request.get(_BEFORE)
    remove_shared_memory(environment["MASTER_ADDR"], environment["MASTER_PORT"], before)
    shutil.rmtree(workers_folder(environment, guard), ignore_errors=True)
    if scratch := scratch_of(request["payload"]):
        folders.remove(scratch)
    if before is None:
        return {}
    new = {
        name
        for name, number in shared_segments.segments().items()
        # Buffers of another rendezvous belong to another trial, whose guard removes them.
        if before.get(name) != number and not name.startswith(shared_segments.BUFFERS)
    }
    if not new:
        return {}
    noted = shared_segments.noted(scratch) if scratch else set()
    known = {*held, *noted, *(name for name in new if _made_by(name) in pids)}
    without_holder = new - shared_segments.held_by_anybody()
    removed, left = {}, {}
    for name in without_holder:
        segment = shared_segments.FOLDER / name
        with contextlib.suppress(OSError):
            size = segment.stat().st_size
            if name in known:
                segment.unlink()
                removed[name] = size
            else:
                left[name] = size
    return {REMOVED: removed, LEFT: left}


def _made_by(name: str) -> int | None:
    named = _OF_TORCH.match(name)
    return None if named is None else int(named[1])


def scratch_of(payload: Mapping[str, Any]) -> Path | None:
    scratch = payload.get("scratch")
    return None if scratch is None else Path(scratch)


def remove_shared_memory(address: str, port: str, before: Mapping[str, int] | None) -> None:
    """Removes what DeepSpeed and NCCL leave in shared memory when their ranks are killed.

    The buffers of DeepSpeed's CPU collectives take some 70 MB a rank. Their names end in the address and port of the
    rendezvous, which only one trial has. A segment of NCCL's, some MB for each pair of ranks, may belong to another
    program. It is removed only if this process would see that program.
    """
    for buffer in shared_segments.FOLDER.glob(f"{shared_segments.BUFFERS}*_{address}_{port}_*"):
        buffer.unlink(missing_ok=True)
    if before is None or not shared_segments.are_all_holders_seen():
        return
    now = shared_segments.segments()
    for name in shared_segments.abandoned(shared_segments.OF_NCCL):
        if name in now and before.get(name) != now[name]:
            with contextlib.suppress(OSError):
                (shared_segments.FOLDER / name).unlink()


def workers_folder(environment: Mapping[str, str], guard: int) -> Path:
    """Returns the folder for the sockets of the workers that a trial's program starts. Its guard removes it.

    The workers would otherwise make folders in the temporary one, and leave them when they are killed.
    """
    # Short, because a socket's path may only have a hundred characters.
    return Path(environment.get("TMPDIR") or "/tmp") / f"zerotune-workers-{guard}"


# The logs of processes that print without end. A log keeps its head and its tail. The process that waits for the
# printing ones looks at their logs' sizes now and then. A pipe would wake it for each line, on a rank's core.

LOGS_LOOK_S = 0.5  # seconds between two looks; until the next one a log may grow beyond its bound

MOST_LOG_BYTES, KEPT_LOG_BYTES = 16 * 2**20, 4 * 2**20
"""A log that has more bytes keeps so many of its beginning, and as many of its end."""

_NOTICE = "\n[ZeroTune has left out {} bytes here.]\n"
_NOTICE_READ = re.compile(_NOTICE.replace("[", r"\[").replace("]", r"\]").format(r"(\d+)").encode())


def logs_of(request: dict[str, Any]) -> list[Path]:
    """Returns the logs of a launch, those of a sweep's later sizes included."""
    of_ranks = [rank["log"] for rank in request["ranks"]]
    of_sizes = [log for size in request["payload"].get("sizes", ()) for log in size["logs"]]
    return [Path(log) for log in dict.fromkeys([*of_ranks, *of_sizes])]


def bound_logs(logs: Iterable[Path]) -> None:
    """Cuts the middle out of each log that is too long. What it cuts out is counted in the middle.

    Other processes append meanwhile, and lose no more than they print while this shortens the file.
    """
    for log in logs:
        # A program may have removed its log, and the study its folder.
        with contextlib.suppress(OSError):
            if log.stat().st_size > MOST_LOG_BYTES:
                _cut_middle(log)


def _cut_middle(log: Path) -> None:
    with log.open("rb+", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        before = _NOTICE_READ.match(os.pread(file.fileno(), len(_NOTICE) + 20, KEPT_LOG_BYTES))
        notice = _NOTICE.format(size - 2 * KEPT_LOG_BYTES + (int(before[1]) - len(before[0]) if before else 0)).encode()
        tail = os.pread(file.fileno(), 2 * KEPT_LOG_BYTES, size - KEPT_LOG_BYTES)
        os.pwrite(file.fileno(), notice + tail, KEPT_LOG_BYTES)
        file.truncate(KEPT_LOG_BYTES + len(notice) + len(tail))


# The watchdog, and the other end of a tie.


@dataclass(frozen=True)
class Ended:
    """A process that had a watchdog, when it and all its descendants have ended."""

    pid: int  # of the process
    status: int  # as `os.waitpid` returns it
    held: set[str]  # names of the segments of shared memory that its last descendants had mapped
    pids: set[int]  # of these descendants


def wait_for(pid: int) -> int:
    """Waits for a child, and returns its status as `os.waitpid` does."""
    return os.waitpid(pid, 0)[1]


def leave_watchdog(
    clean_up: Callable[[Ended], int], wait: Callable[[int], int] = wait_for, survives_watchdog: bool = False
) -> None:
    """Goes on as a fork. This process stays behind as the fork's watchdog, and does not return.

    A watchdog that someone has stopped goes on when its own parent ends.
    """
    become_subreaper()
    go_on_without_parent(os.getppid())
    watchdog = os.getpid()
    watched = os.fork()
    if watched:
        status = wait(watched)
        os._exit(clean_up(Ended(watched, status, *kill_descendants())))
    if survives_watchdog:
        go_on_without_parent(watchdog)
    else:
        die_with_parent(watchdog)
    become_subreaper()


_TIE_POLL_MS = 100


def wait_while_tied(
    process: "subprocess.Popen[bytes]", tie: int, meanwhile: Callable[[], bool | None] = lambda: None
) -> int | None:
    """Waits until a child has ended, and returns its status; None if the other end of a tie has closed first.

    Neither does it wait any longer when `meanwhile`, which is called repeatedly, returns True.
    """
    poll = select.poll()
    poll.register(tie, select.POLLIN)
    while process.poll() is None and not poll.poll(_TIE_POLL_MS):
        if meanwhile():
            break
    return process.poll()


# A tied process: a command that ends, with all its descendants, when the process that started it ends.

_TERM_S = 5.0
# The holder gives the command its time, and kills what is left.
_CLOSE_S = 2 * _TERM_S


class TiedProcess:
    """A running command, and this end of its tie. The holder, which runs the command, has the other end."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs, open_own(log, "ab") as output:
            inherited = [theirs.fileno(), *descriptors]
            listed = ",".join(map(str, inherited))
            self._process = subprocess.Popen(
                bootstrap.command(sys.executable, "zerotune.trial_lib.launch.processes.watchdog", listed, *command),
                pass_fds=inherited,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit code of a command that has ended by itself, as a shell shows it; None while it runs."""
        return self._process.poll()

    @property
    def processes(self) -> list[psutil.Process]:
        """The command and all its descendants, each after its parent."""
        try:
            # The first is the holder.
            return psutil.Process(self._process.pid).children(recursive=True)[1:]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kills the command and its descendants at once, parents first, so that no parent notices a child's end."""
        kill_all(self.processes)
        self.close()

    def close(self) -> None:
        """Ends the command: by SIGTERM first, then by a kill of all its descendants. Returns when they are gone."""
        self._ours.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            # The holder, or its watchdog, is stopped (SIGSTOP).
            with contextlib.suppress(psutil.NoSuchProcess):
                kill_all(psutil.Process(self._process.pid).children(recursive=True))
            self._process.kill()
            self._process.wait()


def main(arguments: list[str]) -> None:
    """Entry of the holder: runs a command until the other end of its tie closes."""
    tie, *descriptors = map(int, arguments[0].split(","))
    driver = socket.socket(fileno=tie)
    # The driver handles the terminal's Ctrl-C.
    os.setsid()

    def wait(holder: int) -> int:
        driver.close()
        return wait_for(holder)

    # A holder whose watchdog is killed still ends the command in order.
    leave_watchdog(lambda holder: os.waitstatus_to_exitcode(holder.status), wait, survives_watchdog=True)
    status = _hold(driver, arguments[1:], descriptors, os.getppid())
    kill_descendants()
    # A signal has a status above 128, as in a shell, because an exit code cannot be negative.
    sys.exit(status if status >= 0 else 128 - status)


def _hold(driver: socket.socket, words: Sequence[str], descriptors: Sequence[int], parent: int) -> int:
    # Runs a command until it, the driver or the parent ends; returns its status.
    command = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=descriptors)
    if wait_while_tied(command, driver.fileno(), lambda: os.getppid() != parent) is None:
        command.terminate()
        try:
            command.wait(timeout=_TERM_S)
        except subprocess.TimeoutExpired:
            return 0
    return command.returncode
