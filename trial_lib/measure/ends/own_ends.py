"""Ways in which a program ends its own process without Python's own end: `os._exit`, or a signal to itself.

They skip everything that runs at the end. The steps that are measured by then have to count.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

from trial_lib.measure.ends.closing import Closing
from trial_lib.wire.next_size import NextSize

# Signals that end a process without a handler, and that mean no error.
_ENDS = (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)

_exit_now = os._exit


def install(find: Callable[[], Closing]) -> None:
    """Closes the measurement before a program ends its own process. Call it before the program runs.

    Args:
        find: returns the closing of the current size.
    """
    process = os.getpid()

    def close() -> None:
        closing = find()
        # A child that the program has forked is not the rank. A rank that is measured may end.
        if os.getpid() != process or closing.probe.has_finished:
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
        elif os.getpid() == process and not find().probe.has_finished:
            find().fail(SystemExit(status))
        _exit_now(status)

    def to_itself(name: str, own: Callable[[Any], bool]) -> None:
        original = getattr(os, name)

        def send(target: int, number: int) -> None:
            """Replaces `os.kill` and `os.killpg`."""
            if own(target) and number in _ENDS and _is_default(number):
                close()
            original(target, number)

        setattr(os, name, send)

    def raise_signal(number: int) -> None:
        """Replaces `signal.raise_signal`."""
        if number in _ENDS and _is_default(number):
            close()
        original_raise(number)

    original_raise = signal.raise_signal
    os._exit = exit_now  # type: ignore[assignment]
    signal.raise_signal = raise_signal
    to_itself("kill", lambda target: target in (0, os.getpid()))
    to_itself("killpg", lambda target: target in (0, os.getpgrp()))


def _is_default(number: int) -> bool:
    return number == signal.SIGKILL or signal.getsignal(number) == signal.SIG_DFL
