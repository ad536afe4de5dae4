"""Ways in which a program ends its own process without Python's, or starts ranks of its own."""

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerotune.trial_lib.inputs.launchers import launcher_in
from zerotune.trial_lib.inputs.words import ASSIGNMENT
from zerotune.trial_lib.messages.orders import SENDS, NextSize
from zerotune.trial_lib.rank.closing import Closing
from zerotune.trial_lib.rank.endings import EndedEarlyError
from zerotune.trial_lib.rank.patching import stand_in
from zerotune.trial_lib.rank.user_program import say

# Signals that end a process without a handler, and that mean no error.
_ENDS = (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)

_EXECUTES = (
    "The program replaces itself by another one before it is measured: os.exec of {}. ZeroTune measures in the process "
    "that it starts. Let the program train there, for example by typing the command that it executes."
)
_exit_now = os._exit


def install_own_ends(find: Callable[[], Closing]) -> None:
    """Closes the measurement before a program ends its own process. `find` returns the closing of the current size."""
    process = os.getpid()

    def is_over() -> bool:
        # A child that the program has forked is not the rank. A rank that is measured may end.
        return os.getpid() != process or find().probe.has_finished

    def has_counted_enough() -> bool:
        probe = find().probe
        return probe.progress["counted"] >= probe.window.min_steps

    def close() -> None:
        closing = find()
        if is_over():
            return
        try:
            closing.by_itself()
        except NextSize:
            raise
        except BaseException as error:  # noqa: BLE001 - the program would not hear of it
            closing.fail(error)

    def exit_now(status: int) -> None:
        if status == 0:
            close()
        elif not is_over():
            find().fail(SystemExit(status))
        _exit_now(status)

    def to_itself(name: str, own: Callable[[Any], bool]) -> None:
        original = getattr(os, name)

        def send(target: int, number: int) -> None:
            if own(target) and number in _ENDS and _is_default(number):
                close_by(number, "its own process" if target == os.getpid() else "its own process group")
            original(target, number)

        setattr(os, name, send)

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
                find().fail(EndedEarlyError(_EXECUTES.format(words)))
            original(path, arguments, *environment)

        setattr(os, name, replaced)

    original_raise = signal.raise_signal
    os._exit = exit_now  # type: ignore[assignment]
    signal.raise_signal = raise_signal
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

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]
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
    os.system, os.execv, os.execve = run_system, replace_by, replace_by_in  # type: ignore[assignment]


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
