"""Recognises a launcher process by its command line.

A rank imports this module, so it needs only the standard library.
"""

import os
import re
from collections.abc import Sequence

LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner")
_SCRIPTS = ("torchrun", "deepspeed", "accelerate-launch")
_OF_CLUSTERS = ("mpirun", "mpiexec", "orterun", "srun")
_ACCELERATE = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli", "accelerate")
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
    if not words or (len(words) > 1 and words[-1] in _ABOUT_ITSELF and _ends_as_launcher(words[:-1])):
        return None
    if not is_python(words[0]):
        return list(words) if _is_launcher(words) else None
    position = python_target(words)
    if position is None:
        return None
    target = words[position]
    if words[position - 1] != "-m":
        rest = words[position:]
        return list(rest) if _is_launcher(rest) else None
    if target in LAUNCHER_MODULES or target == _ACCELERATE[0]:
        return [words[0], *words[position - 1 :]]
    if target in _ACCELERATE and words[position + 1 : position + 2] == ["launch"]:
        return [words[0], "-m", _ACCELERATE[0], *words[position + 2 :]]
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


def _ends_as_launcher(words: Sequence[str]) -> bool:
    return words[-1] in (*LAUNCHER_MODULES, *_ACCELERATE, "launch") or _is_launcher(words[-1:])


def _is_launcher(words: Sequence[str]) -> bool:
    name = _name(words[0])
    return name in (*_SCRIPTS, *_OF_CLUSTERS) or (name == "accelerate" and list(words[1:2]) == ["launch"])


def _name(path: str) -> str:
    return os.path.basename(path)  # noqa: PTH119 - of a program of whatever system
