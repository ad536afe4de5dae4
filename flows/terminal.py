"""A command's output: sentences on standard error, JSON on standard output.

Both are for the study's owner, who typed the secrets and owns the folder that has them. So nothing in them is hidden:
a printed path exists, and a printed command runs.
"""

import contextlib
import errno
import io
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from zerotune.trial_lib.messages.errors import plain
from zerotune.trial_lib.records.folders import DOCUMENT_VERSION

# A terminal is watched. A file is read later, and each line of it stays.
_WORD_S, _RARE_WORD_S = 4.0, 60.0
# A write to a terminal whose window or connection was closed.
_TERMINAL_GONE = (errno.EIO, errno.ENXIO)


def say(text: str = "", to_people: bool = True) -> None:
    click.echo(plain(text), err=to_people)


def say_error(error: Exception | str) -> None:
    """Prints why a command has ended. A message that already begins with the command's name gets no prefix."""
    message = str(error)
    say(message if message.startswith("zerotune ") else f"zerotune: {message}")


@contextlib.contextmanager
def telling_still(what: str, tell: Callable[[str], None] = say, every_s: float | None = None) -> Iterator[None]:
    """Tells now and then, in another thread, that the body still works."""
    ended, began = threading.Event(), time.monotonic()
    every_s = every_s or (_WORD_S if sys.stderr.isatty() else _RARE_WORD_S)

    def work() -> None:
        while not ended.wait(every_s):
            tell(f"still {what} ({time.monotonic() - began:.0f} s)")

    thread = threading.Thread(target=work, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def say_ways(label: str, ways: Sequence[str], width: int = 15) -> None:
    """Prints how a person gets to a page of MLflow's."""
    *commands, place = ways
    for command in commands:
        say(f"{label:<{width}}{command}")
    say_link(f"{'  then open:' if commands else label:<{width}}", place)


def say_link(label: str, address: str) -> None:
    """Prints the address of a page. On a terminal one of `zerotune up`'s servers logs the browser in."""
    # `zerotune --help` needs no server.
    from zerotune.flows.prefect_server import link_for_a_person

    say(f"{label}{link_for_a_person(address)}")


def print_document(document: Mapping[str, Any]) -> None:
    click.echo(json.dumps({"version": DOCUMENT_VERSION, **document}, indent=2))


def open_streams() -> None:
    """Makes sure that standard output and standard error can be written to.

    If one was closed before the command began, the next file that is opened would take its number. If its reader has
    gone, as after `| head -1`, or its terminal, the study must continue.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The kernel takes the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = _stream(1, "strict"), _stream(2, "backslashreplace")


def _stream(number: int, errors: str) -> io.TextIOWrapper:
    before = sys.stdout if number == 1 else sys.stderr
    encoding = "utf-8" if before is None else before.encoding
    file = io.BufferedWriter(_WithoutReader(number, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding, errors if before is None else before.errors, line_buffering=True)


class _WithoutReader(io.FileIO):
    """A stream that discards its output once its reader has gone. So do the processes that this one starts."""

    def write(self, content: Any) -> int | None:
        try:
            return super().write(content)
        except OSError as error:
            is_terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
            if error.errno != errno.EPIPE and not (is_terminal and error.errno in _TERMINAL_GONE):
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(content)
