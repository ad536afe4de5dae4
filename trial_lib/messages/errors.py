"""The error for mistakes in a user's input, and the one for a program that cannot be foreseen."""

import re
from collections.abc import Iterator


class ProgramNotForeseenError(Exception):
    """The program cannot be foreseen. The message says why, with the line if it is known, and what to do instead."""


class InputError(Exception):
    """Input that cannot be used: the mistake, its place, and the remedy.

    The command line prints it as one message and exits with code 2, before it has started anything.
    """

    def __init__(self, what: str, *, where: str, remedy: str) -> None:
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.where}: {self.what} {self.remedy}"


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, the one that caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# Sequences that a terminal obeys and does not show: colours, cursor movements, titles and links.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
# All other control characters, and characters that turn the direction of a line.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_NOT_UTF_8 = re.compile(r"[\ud800-\udfff]")


def plain(text: str) -> str:
    r"""Returns a text without anything that a terminal obeys. Lines and tabs stay.

    Example:
        >>> plain("\x1b[31mred\x1b[0m \x1b]0;title\x07\tdone")
        'red \tdone'
    """
    text = _ESCAPES.sub("", text.replace("\r\n", "\n"))
    return _NOT_UTF_8.sub("\ufffd", _UNPRINTABLE.sub("", text))
