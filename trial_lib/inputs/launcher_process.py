"""Recognises a launcher process by its command line.

A rank imports this module, so it imports neither pydantic nor torch.
"""

import base64
import binascii
import json
import os
import re
from collections.abc import Sequence

from trial_lib.inputs.launchers import DEEPSPEED_LAUNCH, LAUNCHERS, all_modules, launcher_of

_PYTHON = re.compile(r"python[\d.]*")
# A launcher with one of these options prints and exits. It starts no rank.
_ABOUT_ITSELF = ("--version", "-V", "-version", "--help", "-h")
_WORLD = "--world_info"
# DeepSpeed's launcher adds these itself, and tells the module its hosts and devices in base64.
_ITS_OWN = ("--node_rank", "--master_addr", "--save_pid", "--enable_each_rank_log")
_SWITCHES = ("--module", "--no_python", "--no_local_rank", "--bind_cores_to_rank", "--quiet", "-q")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def launcher_in(words: Sequence[str]) -> list[str] | None:
    """Returns the command of a launcher, as a user may type it; None for any other process.

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
        for module in launcher.modules:
            named = module.split()
            if list(words[position : position + len(named)]) == named:
                started = runner_words(words[position + 1 :]) if module == DEEPSPEED_LAUNCH else None
                if started is not None:
                    return [words[0], "-m", launcher.modules[0], *started]
                # A module with a subcommand is typed by the module that the subcommand is.
                typed = launcher.modules[0] if len(named) > 1 else module
                return [words[0], "-m", typed, *words[position + len(named) :]]
    return None


def runner_words(words: Sequence[str]) -> list[str] | None:
    """Returns the words of `deepspeed.launcher.runner` that start the same ranks as `deepspeed.launcher.launch`.

    Args:
        words: behind the name of the module. None is returned for several hosts.

    Example:
        >>> runner_words(["--world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19", "train.py", "--lr", "0.1"])
        ['--num_gpus', '2', 'train.py', '--lr', '0.1']
    """
    rest, kept, world = list(words), [], ""
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).partition("=")
        if not equals and flag not in _SWITCHES and rest:
            value = rest.pop(0)
        if flag == _WORLD:
            world = value
        elif flag not in _ITS_OWN:
            kept += [flag] if flag in _SWITCHES else [flag, value]
    try:
        hosts: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(world))
        ((_, devices),) = hosts.items()
    except (binascii.Error, ValueError, AttributeError):
        return None
    if devices == list(range(len(devices))):
        chosen = ["--num_gpus", str(len(devices))]
    else:
        chosen = ["--include", "localhost:" + ",".join(map(str, devices))]
    return [*chosen, *kept, *rest]


def is_python(program: str) -> bool:
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
    programs = (program for launcher in LAUNCHERS.values() for program in launcher.programs)
    return (
        _name(word) in {spelled.split()[-1] for spelled in (*programs, *all_modules())}
        or launcher_of([word]) is not None
    )


def _name(path: str) -> str:
    return os.path.basename(path)  # noqa: PTH119 - of a program of whatever system
