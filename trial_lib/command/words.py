"""A command as a shell would split it, without a shell: what only a shell could do is refused by name."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from trial_lib.command.launchers import launchers_listed
from trial_lib.wire.errors import InputError

REMEDY = "Write `python3 SCRIPT ARGUMENTS`: ZeroTune starts the ranks itself."
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
"""How a word begins that sets an environment variable before a command."""

_SHELL_SYNTAX = frozenset("|&;<>()$`*?\n")


class Words:
    """The words of a command that are still to be read, and what was left out on the way.

    Attributes:
        rest: the words.
        where: how an error names the place they come from.
        notes: one sentence for each word that was left out.
        follows: whether the launcher's options count, as for a command that was typed; those in a YAML are left out.
        environment: the variables that the command would find, its own assignments among them.
        folder: what its relative paths stand in.
        program: the launcher that is being read, as it was typed.
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
        """The next word, which stays."""
        return self.rest[0]

    def take(self) -> str:
        """Returns the next word, and goes on."""
        return self.rest.pop(0)

    def take_value(self, option: str) -> str:
        """Returns the value of an option that was just taken: behind its `=`, or the next word."""
        if "=" in option:
            return option.partition("=")[2]
        return self.take_after(option)

    def take_after(self, option: str) -> str:
        """Returns the word behind an option that was just taken."""
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
        InputError: a quote stays open, or something stands outside of quotes that a shell would act on.
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
    """Returns the first piece of text that a shell would act on, outside of quotes."""
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
