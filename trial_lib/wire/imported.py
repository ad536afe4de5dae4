"""What a program has imported, so that a fork server can import it ahead. A rank imports this module."""

from collections.abc import Sequence

Import = str | dict[str, str | None]
"""A module; or environment variables that the program sets before the next modules, where None removes one."""


def modules_in(imported: Sequence[Import]) -> list[str]:
    """Returns the modules alone, in their order."""
    return [each for each in imported if isinstance(each, str)]
