"""Ends a rank whose program ends before it is measured: by agreement of the ranks, or as it ends its own process."""

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from zerotune.trial_lib.inputs.launchers import launcher_in
from zerotune.trial_lib.inputs.words import ASSIGNMENT
from zerotune.trial_lib.messages.orders import ANOTHER_HAS_FAILED, SENDS, NextSize
from zerotune.trial_lib.rank.device import Device
from zerotune.trial_lib.rank.endings import (
    ENDED,
    FAILED,
    WAITS,
    WORKS,
    Doing,
    EndedEarlyError,
    RankEnd,
    Stack,
    WaitsForEverError,
    are_uneven,
    doing,
    is_of_a_collective,
    place_of,
    stack_of,
    too_little_data,
    uneven_note,
    waits_for_ever,
)
from zerotune.trial_lib.rank.loader_batches import loader_batches
from zerotune.trial_lib.rank.patching import put, stand_in
from zerotune.trial_lib.rank.probe import Probe, Session
from zerotune.trial_lib.rank.rank_consensus import NoAgreementError, RankConsensus, by_messages
from zerotune.trial_lib.rank.user_program import say

# Ending a trial whose program ends before it is measured, by agreement among its ranks.


# The guard gives the peers of a failed rank this long. A rank that waits in a thread needs no longer.
_PEERS_S, _WAITING_S = 3.0, 60.0
_NOWHERE = Doing("", "")


class EarlyFinish:
    """The end of one size's measurement, on this rank."""

    def __init__(
        self,
        probe: Probe,
        consensus: RankConsensus,
        session: Session,
    ) -> None:
        self.probe = probe
        self.consensus = consensus
        self.session = session
        self._closes = threading.Lock()
        self._closer: threading.Thread | None = None
        self._raised: Exception | None = None

    @property
    def is_closed(self) -> bool:
        return self.probe.has_finished or self.is_closing

    @property
    def is_closing(self) -> bool:
        """Whether the program has ended, or waits forever, so that it trains no further."""
        return self._closes.locked()

    def say(self, end: RankEnd | None) -> None:
        self.consensus.say(None if end is None else asdict(end))

    def by_itself(self) -> None:
        """Closes for a program that has ended. `EndedEarlyError` if it has no engine, or another rank has failed."""
        self.say(self.end(ENDED, _NOWHERE))
        if threading.current_thread() is not self.probe.thread:
            self.session.leave()
        self._close(ENDED, _NOWHERE, float("inf"))

    def after(self, error: BaseException) -> None:
        """Closes if the exception that has ended the program means that its data are over; else returns."""
        if _data_are_over(error, self.probe.micro_batches):
            self.by_itself()
        elif is_of_a_collective(error):
            self._close(FAILED, _NOWHERE, _PEERS_S)

    def waits(self, doing: Doing) -> None:
        """Closes, from a thread of its own, for a program that waits forever. Ends the process."""
        # A value that has to be read from a device may wait with the device.
        limit = threading.Timer(_WAITING_S, lambda: self.session.fail(WaitsForEverError(self._alone(doing))))
        limit.daemon = True
        limit.start()
        try:
            self._close(WAITS, doing, _WAITING_S / 2)
            self.session.fail(WaitsForEverError(self._alone(doing)))
        except BaseException as error:  # noqa: BLE001 - there is nobody above to hear of it
            self.session.fail(error)

    def _alone(self, doing: Doing) -> str:
        return waits_for_ever([self.end(WAITS, doing)], self.probe.has_engine)

    def end(self, kind: str, doing: Doing) -> RankEnd:
        return RankEnd(kind, **self.probe.progress, waits_in=doing.waits_in, where=doing.where)

    def _close(self, kind: str, doing: Doing, seconds: float) -> None:
        # Agrees with the other ranks. Returns only if a failure of this rank counts as one.
        if not self._closes.acquire(blocking=False):
            if self._closer is threading.current_thread() and self._raised is not None:
                # The program has caught the error, and has ended again.
                raise self._raised
            # Another thread of this rank is about to end the process.
            while True:
                time.sleep(_WAITING_S)
        self._closer = threading.current_thread()
        try:
            self._agree(kind, doing, seconds)
        except (EndedEarlyError, WaitsForEverError) as error:
            self._raised = error
            raise

    def _agree(self, kind: str, doing: Doing, seconds: float) -> None:
        probe = self.probe
        brought = self.consensus.gather(asdict(self.end(kind, doing)), seconds)
        ends = [] if brought is None else [RankEnd(**each) for each in brought]
        if kind == FAILED and not are_uneven(ends):
            return
        if not ends:
            raise EndedEarlyError(ANOTHER_HAS_FAILED)
        if any(end.kind == WAITS for end in ends) and (not probe.has_engine or not are_uneven(ends)):
            raise WaitsForEverError(waits_for_ever(ends, probe.has_engine))
        if not probe.has_engine:
            raise EndedEarlyError(_without_engine(probe))
        if any(end.kind != ENDED for end in ends):
            self.session.leave()
        self._hand_over(ends)

    def _hand_over(self, ends: list[RankEnd]) -> None:
        probe = self.probe
        counted, steps = min(end.counted for end in ends), min(end.steps for end in ends)
        if counted < probe.window.enough_at_end:
            elsewhere = probe.facts.found.steps_elsewhere
            reason = too_little_data(ends, probe.window.end_step, probe.batch)
            probe.refuse("out_of_data", f"{reason}{_another_trains(elsewhere)}" if elsewhere > steps else reason)
            return
        try:
            with by_messages(self.consensus):
                probe.measure_common(counted, steps, uneven_note(ends) if are_uneven(ends) else "")
        except NoAgreementError:
            raise EndedEarlyError(ANOTHER_HAS_FAILED) from None


def _data_are_over(error: BaseException, micro_batches: int) -> bool:
    # Whether an exception only means that there was no further batch, or none at all.
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, StopIteration):
            return True
        link = link.__cause__
    # Code after a loop that never began uses the last loss, or the number of batches.
    return micro_batches == 0 and loader_batches.came_empty and isinstance(error, (NameError, ArithmeticError))


def _another_trains(steps: int) -> str:
    return (
        f" ZeroTune measures the first engine that trains, and other engines have taken {steps} optimizer steps. "
        "To tune one of those, let the program train it first."
    )


def _without_engine(probe: Any) -> str:
    if probe.has_frozen_engine:
        return (
            "None of the program's DeepSpeed engines has an optimizer, so none of them trains. Give "
            "deepspeed.initialize an optimizer, or name one in its configuration."
        )
    return "The program ended without calling deepspeed.initialize."


# Ranks that wait for each other forever: a thread in each rank looks once a second at the rank's state

_TICK_S = 1.0
# A process that is awake for less than that only checks its threads.
_IDLE_SHARE = 0.05
_MOST_BYTES, _MOST_SLEEPS = 2**20, 3
# If one of the ranks has ended, or has had other batches, less time is enough.
_SURE_SHARE = 1 / 3


class Watcher(threading.Thread):
    """Notes when its thread stands still, and ends a wait: no rank has shown activity for `patience_s` seconds."""

    def __init__(self, find: Callable[[], EarlyFinish], model_dir: Path, patience_s: float) -> None:
        super().__init__(daemon=True, name="zerotune-waiting")
        self._find = find
        self._model_dir = model_dir
        self._patience_s = patience_s
        self._fed: object = None
        self._fed_at = self._moved_at = time.monotonic()
        self._place: object = None
        self._times_sure = 0
        self._said: RankEnd | None = None
        self._activity = Activity()

    def run(self) -> None:
        while True:
            time.sleep(_TICK_S)
            finish = self._find()
            stack = stack_of(finish.probe.thread.ident or 0)
            if not finish.is_closed and stack:
                self._look(finish, stack)

    def _look(self, finish: EarlyFinish, stack: Stack) -> None:
        now, fed = time.monotonic(), (finish.probe, finish.probe.micro_batches)
        if fed != self._fed:
            self._fed, self._fed_at, self._place = fed, now, None
        if self._place != place_of(stack) or self._moves(finish, now):
            self._place, self._moved_at, self._times_sure = place_of(stack), now, 0
        short = self._patience_s * _SURE_SHARE
        if now - self._fed_at < short:
            self._say(finish, None)
            return
        device, does = finish.probe.device, None
        if now - self._moved_at >= short:
            does = doing(stack, self._model_dir, device is not None and device.is_busy())
        if does is not None and does.waits_in:
            self._say(finish, finish.end(WAITS, does))
            self._decide(finish, does, now - self._moved_at)
        elif now - self._fed_at >= self._patience_s:
            self._say(finish, finish.end(WORKS, does or doing(stack, self._model_dir)))

    def _moves(self, finish: EarlyFinish, now: float) -> bool:
        # Whether another part of the process is active. It costs milliseconds, so it is asked only just before it
        # matters.
        soon = self._patience_s * _SURE_SHARE - 2 * _TICK_S
        if now - self._moved_at <= max(soon, _TICK_S):
            return False
        return self._activity.was(finish.probe.thread, finish.probe.device)

    def _decide(self, finish: EarlyFinish, does: Doing, still_s: float) -> None:
        said = finish.consensus.said()
        ends = [RankEnd(**state) for state in said if state is not None]
        if len(ends) < len(said) or any(end.kind == WORKS for end in ends):
            self._times_sure = 0
            return
        if are_uneven(ends) or still_s >= self._patience_s:
            self._times_sure += 1
        if self._times_sure > 1:
            finish.waits(does)

    def _say(self, finish: EarlyFinish, end: RankEnd | None) -> None:
        if end != self._said:
            finish.say(end)
            self._said = end


class Activity:
    """The activity of this process apart from one thread: other threads, child processes, and the disk."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = (0.0, 0.0, 0)
        self._at = 0.0

    def was(self, thread: threading.Thread, device: Device | None) -> bool:
        """Whether there was activity since the last, recent call. `device` is what the thread may wait for."""
        before, at = self._before, self._at
        moved_bytes = _bytes_of(self._process) + sum(self._of_children(_bytes_of))
        self._before, self._at = (self._seconds(thread, device), moved_bytes, _sleeps(thread)), time.monotonic()
        seconds, moved, sleeps = (abs(now - then) for now, then in zip(self._before, before, strict=True))
        if self._at - at > 2 * _TICK_S:
            return False
        return seconds > _IDLE_SHARE * (self._at - at) or moved > _MOST_BYTES or sleeps > _MOST_SLEEPS

    def _seconds(self, thread: threading.Thread, device: Device | None) -> float:
        # A thread may spin while it waits for a device. Its own time then shows nothing.
        spins = device is not None and device.is_apart and thread.ident is not None
        own = time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) if spins else 0.0
        return time.process_time() - own + sum(self._of_children(lambda child: sum(child.cpu_times()[:2])))

    def _of_children(self, figure: Callable[[psutil.Process], float]) -> Iterator[float]:
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                yield figure(child)


def _bytes_of(process: psutil.Process) -> float:
    # Not every kernel counts them.
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        io = process.io_counters()
        return float(io.read_bytes + io.write_bytes)
    return 0.0


def _sleeps(thread: threading.Thread) -> int:
    # How often a thread has gone to sleep. A blocked thread does not do so again and again.
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/task/{thread.native_id}/status").read_text(errors="replace").splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                return int(line.split()[1])
    return 0


# Ways in which a program ends its own process without Python's, or starts ranks of its own.


# Signals that end a process without a handler, and that mean no error.
_ENDS = (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)

_EXECUTES = (
    "The program replaces itself by another one before it is measured: os.exec of {}. ZeroTune measures in the process "
    "that it starts. Let the program train there, for example by typing the command that it executes."
)
_exit_now = os._exit


def install_own_ends(find: Callable[[], EarlyFinish]) -> None:
    """Closes the measurement before a program ends its own process. `find` returns that of the current size."""
    process = os.getpid()

    def is_over() -> bool:
        # A child that the program has forked is not the rank. A rank that is measured may end.
        return os.getpid() != process or find().probe.has_finished

    def has_counted_enough() -> bool:
        probe = find().probe
        return probe.progress["counted"] >= probe.window.enough_at_end

    def close() -> None:
        finish = find()
        if is_over():
            return
        try:
            finish.by_itself()
        except NextSize:
            raise
        except BaseException as error:  # noqa: BLE001 - the program would not hear of it
            finish.session.fail(error)

    def exit_now(status: int) -> None:
        if status == 0:
            close()
        elif not is_over():
            find().session.fail(SystemExit(status))
        _exit_now(status)

    def to_itself(name: str, own: Callable[[Any], bool]) -> None:
        original = getattr(os, name)

        def send(target: int, number: int) -> None:
            if own(target) and number in _ENDS and _is_default(number):
                close_by(number, "its own process" if target == os.getpid() else "its own process group")
            original(target, number)

        put(os, name, send)

    def raise_signal(number: int) -> None:
        if number in _ENDS and _is_default(number):
            close_by(number, "its own process")
        original_raise(number)

    def close_by(number: int, target: str) -> None:
        if is_over():
            return
        if has_counted_enough():
            close()
        with contextlib.suppress(Exception):  # the program may have closed it
            sys.stdout.flush()
        steps = find().probe.progress["steps"]
        say(SystemExit(f"{SENDS}{signal.Signals(number).name} to {target} after {steps} optimizer steps"))

    def execute(name: str) -> None:
        original = getattr(os, name)

        def replaced(path: Any, arguments: Any, *environment: Any) -> None:
            # `os.execvp` and similar functions call these two.
            if not is_over():
                if has_counted_enough():
                    close()
                words = shlex.join(map(os.fsdecode, arguments))
                find().session.fail(EndedEarlyError(_EXECUTES.format(words)))
            original(path, arguments, *environment)

        put(os, name, replaced)

    original_raise = signal.raise_signal
    put(os, "_exit", exit_now)
    put(signal, "raise_signal", raise_signal)
    to_itself("kill", lambda target: target in (0, os.getpid()))
    to_itself("killpg", lambda target: target in (0, os.getpgrp()))
    execute("execv")
    execute("execve")


def _is_default(number: int) -> bool:
    return number == signal.SIGKILL or signal.getsignal(number) == signal.SIG_DFL


# A program that starts ranks of its own, for which the rank would wait until its deadline

Refuse = Callable[[str], None]
Joining = Callable[[], AbstractContextManager[None]]

_NEW_COMMAND = re.compile(r"&&|\|\|?|;|\(|\n")
_ZEROTUNE_STARTS = "ZeroTune starts the ranks itself"


def install_own_ranks(refuse: Refuse, joining: Joining) -> None:
    """Refuses launchers, workers that train, and larger process groups. `refuse` returns if the program trains."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    _watch_processes(refuse)
    if started == 1:
        # If there are several ranks, they train with each other. Their workers then only prepare data.
        _watch_workers(refuse)
    _watch_groups(refuse, started, joining)


def _watch_processes(refuse: Refuse) -> None:
    original: Callable[..., None] = subprocess.Popen.__init__

    @functools.wraps(original)
    def init(self: Any, args: Any, *others: Any, **named: Any) -> None:
        _refuse_launcher(refuse, args, named.get("env"))
        original(self, args, *others, **named)

    put(subprocess.Popen, "__init__", init)
    system, execv, execve = os.system, os.execv, os.execve

    def run_system(command: Any) -> int:
        _refuse_launcher(refuse, command, None)
        return system(command)

    def replace_by(path: Any, args: Any) -> None:
        _refuse_launcher(refuse, args, None)
        execv(path, args)

    def replace_by_in(path: Any, args: Any, env: Any) -> None:
        _refuse_launcher(refuse, args, env)
        execve(path, args, env)

    # `os.execvp` and similar functions call these two.
    for name, replacement in (("system", run_system), ("execv", replace_by), ("execve", replace_by_in)):
        put(os, name, replacement)


def _refuse_launcher(refuse: Refuse, command: Any, environment: Mapping[str, str] | None) -> None:
    launcher = launcher_of(command)
    if launcher is None:
        return
    changed = [f"{name}={value}" for name, value in (environment or {}).items() if os.environ.get(name) != value]
    typed = " ".join(shlex.quote(word) if not ASSIGNMENT.match(word) else word for word in (*changed, *launcher))
    refuse(f"The program starts `{typed}`, but {_ZEROTUNE_STARTS}. Type `zerotune tune -- {typed}`.")


def launcher_of(command: Any) -> list[str] | None:
    """The command line of a launcher in words, or in a text for a shell; None for any other command.

    >>> launcher_of("cd code && A=1 torchrun train.py")
    ['torchrun', 'train.py']
    """
    if isinstance(command, (str, bytes)):
        for text in _NEW_COMMAND.split(os.fsdecode(command)):
            try:
                words = shlex.split(text)
            except ValueError:
                words = text.split()
            while words and (ASSIGNMENT.match(words[0]) or words[0] in ("exec", "env", "nohup", "time")):
                words.pop(0)
            launcher = launcher_in(words)
            if launcher is not None:
                return launcher
        return None
    if isinstance(command, Sequence) and all(isinstance(word, (str, bytes, os.PathLike)) for word in command):
        return launcher_in([os.fsdecode(word) for word in command])
    return None


def _watch_workers(refuse: Refuse) -> None:
    torch_workers: Any = torch.multiprocessing
    original = torch_workers.start_processes

    @functools.wraps(original)
    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **named: Any) -> Any:
        refuse(
            f"The program starts {nprocs} ranks within Python (torch.multiprocessing), but {_ZEROTUNE_STARTS}. Let it "
            "train as the one rank that RANK, LOCAL_RANK and WORLD_SIZE describe. Type `zerotune tune -- torchrun "
            f"--nproc_per_node {nprocs} SCRIPT ARGUMENTS`."
        )
        return original(fn, args, nprocs, *others, **named)

    stand_in("start_processes", original, start_processes)


def _watch_groups(refuse: Refuse, started: int, joining: Joining) -> None:
    original = torch.distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("world_size", -1)
        size = asked if isinstance(asked, int) and asked > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        if size > started:
            refuse(
                f"The program joins a process group of {size} ranks, but only {started} "
                f"{'was' if started == 1 else 'were'} started. Type `zerotune tune -- torchrun --nproc_per_node {size} "
                "SCRIPT ARGUMENTS`."
            )
        with joining():
            return original(*args, **kwargs)

    stand_in("init_process_group", original, init_process_group)
