"""Splits a command into words as a shell would, without a shell. Syntax that needs a shell is refused."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from trial_lib.command.launchers import launchers_listed
from trial_lib.wire.errors import InputError

REMEDY = "Write `python3 SCRIPT ARGUMENTS`: ZeroTune starts the ranks itself."
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
"""The beginning of a word that sets an environment variable before a command."""

_SHELL_SYNTAX = frozenset("|&;<>()$`*?\n")


class Words:
    """The words of a command while it is read.

    Attributes:
        rest: the words that are not read yet.
        where: the place that errors name.
        notes: one sentence for each word that was left out.
        follows: whether the launcher's options count, as in a typed command. In a YAML they are left out.
        environment: the command's environment variables, with the assignments before it.
        folder: the folder of its relative paths.
        program: the program of the launcher that is being read, as the user typed it.
    """

    def __init__(
        self,
        words: list[str],
        where: str,
        *,
        follows: bool = False,
        environment: Mapping[str, str] | None = None,
        folder: Path = Path(),
    ) -> None:
        """Takes the attributes."""
        self.rest = words
        self.where = where
        self.notes: list[str] = []
        self.follows = follows
        self.environment = dict(environment or {})
        self.folder = folder
        self.program = ""

    def __bool__(self) -> bool:
        """Whether any word is left."""
        return bool(self.rest)

    @property
    def first(self) -> str:
        """The next word. It stays."""
        return self.rest[0]

    def take(self) -> str:
        """Returns the next word and removes it."""
        return self.rest.pop(0)

    def take_value(self, option: str) -> str:
        """Returns the value of the option just read, which is behind its `=` or the next word."""
        if "=" in option:
            return option.partition("=")[2]
        return self.take_after(option)

    def take_after(self, option: str) -> str:
        """Returns the word behind the option just read."""
        if not self.rest:
            raise self.error(f"nothing follows {option}.")
        return self.take()

    def error(self, what: str, remedy: str = "") -> InputError:
        """Returns an error about the command."""
        return InputError(what, where=self.where, remedy=remedy or (_remedy_typed() if self.follows else REMEDY))


def _remedy_typed() -> str:
    return f"Write what starts your training: python, {launchers_listed()}, and its arguments."


def split_command(command: str, where: str) -> list[str]:
    """Returns the words of a command line.

    Raises:
        InputError: a quote stays open, or there is shell syntax outside of quotes.
    """
    text = command.strip().replace("\\\n", " ")
    syntax = _shell_syntax(text)
    if syntax:
        raise InputError(
            f"the entrypoint has {syntax!r}, which only a shell understands, and ZeroTune starts no shell.",
            where=where,
            remedy="Write one plain command, put the character in single quotes if it belongs to an argument, or name "
            "a Python script that does the rest.",
        )
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"the entrypoint cannot be split into words ({str(error).lower()}).", where=where, remedy="Close the quote."
        ) from None


def _shell_syntax(text: str) -> str | None:
    """Returns the first piece of shell syntax outside of quotes."""
    quote = ""
    escaped = False
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            if character == quote:
                quote = ""
            elif quote == '"' and character in "$`":
                return character
        elif character in "'\"":
            quote = character
        elif character in _SHELL_SYNTAX or (character == "~" and (position == 0 or text[position - 1].isspace())):
            operator = text[position : position + 2]
            return operator if operator in ("&&", "||", ">>", "$(") else character
    return None
