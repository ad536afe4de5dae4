"""Recognises a launcher process by its command line.

A rank imports this module, so it imports neither pydantic nor torch.
"""

import os
import re
from collections.abc import Sequence

from trial_lib.command.launchers import LAUNCHERS, all_modules, launcher_of

_PYTHON = re.compile(r"python[\d.]*")
# A launcher with one of these options prints and exits. It starts no rank.
_ABOUT_ITSELF = ("--version", "-V", "-version", "--help", "-h")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def launcher_in(words: Sequence[str]) -> list[str] | None:
    """Returns the command of a launcher, as a user may type it; None for any other process.

    Args:
        words: the command line of a process. For a Python script it begins with the interpreter.

    Example:
        >>> launcher_in(["/opt/env/bin/python", "/opt/env/bin/torchrun", "--nproc_per_node", "2", "train.py"])
        ['/opt/env/bin/torchrun', '--nproc_per_node', '2', 'train.py']
    """
    if not words or (len(words) > 1 and words[-1] in _ABOUT_ITSELF and _ends_as_launcher(words[-2])):
        return None
    if not is_python(words[0]):
        return list(words) if _starts_ranks(words) else None
    position = python_target(words)
    if position is None:
        return None
    if words[position - 1] != "-m":
        script = words[position:]
        return list(script) if _starts_ranks(script) else None
    for launcher in LAUNCHERS.values():
        for module in (*launcher.modules, *launcher.other_modules):
            named = module.split()
            if list(words[position : position + len(named)]) == named:
                # A module with a subcommand is typed by the module that the subcommand is.
                typed = launcher.modules[0] if len(named) > 1 else module
                return [words[0], "-m", typed, *words[position + len(named) :]]
    return None


def is_python(program: str) -> bool:
    """Returns whether a program, by its name or path, is a Python interpreter."""
    return _PYTHON.fullmatch(_name(program)) is not None


def python_target(words: Sequence[str]) -> int | None:
    """Returns the position of the script or module in a Python process's command line; None if it runs neither."""
    if not words or not is_python(words[0]):
        return None
    position = 1
    while position < len(words):
        word = words[position]
        if word == "-m":
            return position + 1 if position + 1 < len(words) else None
        if word in ("-c", "-"):
            return None
        if not word.startswith("-"):
            return position
        position += 2 if word in _WITH_VALUE else 1
    return None


def _starts_ranks(words: Sequence[str]) -> bool:
    launcher = launcher_of(words)
    return launcher is not None and not launcher.is_environment


def _ends_as_launcher(word: str) -> bool:
    """Returns whether a word is the last of a launcher's name."""
    programs = (program for launcher in LAUNCHERS.values() for program in launcher.programs)
    return (
        _name(word) in {spelled.split()[-1] for spelled in (*programs, *all_modules())}
        or launcher_of([word]) is not None
    )


def _name(path: str) -> str:
    return os.path.basename(path)  # noqa: PTH119 - of a program of whatever system
