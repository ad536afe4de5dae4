"""What a command says: to people on standard error, to programs on standard output; without secrets, and harmless."""

import io
import json
import os
import sys
from typing import Any

import click

from trial_lib.experiment.plain_text import plain


def shown(text: str) -> str:
    """Returns a text without secrets and control characters."""
    # `zerotune --help` has no time for this import.
    from trial_lib.experiment.known_secrets import known_here

    return known_here().hide(plain(text))


def say(text: str = "", to_people: bool = True) -> None:
    """Prints a line, or several.

    Args:
        text: what is said.
        to_people: whether it goes to standard error; else it is what the command is asked for.
    """
    click.echo(shown(text), err=to_people)


def say_error(error: Exception | str) -> None:
    """Prints why a command has ended, to people. A message that begins with the command gets no second name."""
    message = str(error)
    say(message if message.startswith("zerotune ") else f"zerotune: {message}")


def print_document(document: Any) -> None:
    """Prints one JSON document on standard output."""
    from trial_lib.experiment.known_secrets import known_here

    click.echo(json.dumps(known_here().hide_in(document), indent=2))


def open_streams() -> None:
    """Has standard output and standard error be there, and take what nobody reads any more.

    One that was closed before the command began would otherwise be the next file that is opened. One whose reader has
    gone, as `| head -1` does, is no reason to end a study.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = _stream(1, "strict"), _stream(2, "backslashreplace")


def _stream(number: int, errors: str) -> io.TextIOWrapper:
    before = sys.stdout if number == 1 else sys.stderr
    encoding = "utf-8" if before is None else before.encoding
    file = io.BufferedWriter(_WithoutReader(number, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding, errors if before is None else before.errors, line_buffering=True)


class _WithoutReader(io.FileIO):
    """A stream that goes nowhere once its reader has gone; for what this process starts as well."""

    def write(self, content: Any) -> int | None:
        """Writes what somebody reads."""
        try:
            return super().write(content)
        except BrokenPipeError:
            nobody = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nobody, self.fileno())
            os.close(nobody)
            return super().write(content)
