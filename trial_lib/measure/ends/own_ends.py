"""Ways in which a program ends its own process without Python's own end: `os._exit`, a signal to itself, `os.exec*`.

They skip everything that runs at the end. The steps that are measured by then have to count. If they are not enough,
the program's end is what it would be without ZeroTune, and the record or the log says who has ended it.
"""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any

from trial_lib.measure.ends.closing import Closing
from trial_lib.measure.ends.endings import EndedEarlyError
from trial_lib.measure.user_program import say
from trial_lib.wire.next_size import NextSize
from trial_lib.wire.rank_order import SENDS

# Signals that end a process without a handler, and that mean no error.
_ENDS = (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)

_EXECUTES = (
    "The program replaces itself by another one before it is measured: os.exec of {}. ZeroTune measures in the process "
    "that it starts. Let the program train there, for example by typing the command that it executes."
)
_exit_now = os._exit


def install(find: Callable[[], Closing]) -> None:
    """Closes the measurement before a program ends its own process. Call it before the program runs.

    Args:
        find: returns the closing of the current size.
    """
    process = os.getpid()

    def is_over() -> bool:
        """Returns whether the end is none of this rank's measurement."""
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
        """Replaces `os._exit`."""
        if status == 0:
            close()
        elif not is_over():
            find().fail(SystemExit(status))
        _exit_now(status)

    def to_itself(name: str, own: Callable[[Any], bool]) -> None:
        original = getattr(os, name)

        def send(target: int, number: int) -> None:
            """Replaces `os.kill` and `os.killpg`."""
            if own(target) and number in _ENDS and _is_default(number):
                close_by(number, "its own process" if target == os.getpid() else "its own process group")
            original(target, number)

        setattr(os, name, send)

    def raise_signal(number: int) -> None:
        """Replaces `signal.raise_signal`."""
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
            """Replaces `os.execv` and `os.execve`, through which the others go."""
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
