"""Reading a command: a Python program that starts by itself or by a launcher.

A launcher is read and left out. Its work, to start one process for each device, is ZeroTune's.
"""

import contextlib
import os
import pkgutil
import re
import shutil
from collections.abc import Callable
from typing import Any

from trial_lib.command.elsewhere.started import started_elsewhere
from trial_lib.command.launcher_options import DETERMINED
from trial_lib.command.launcher_process import runner_words
from trial_lib.command.launchers import (
    DEEPSPEED_LAUNCH,
    NONE,
    UserLauncher,
    launcher_of_module,
    launcher_of_program,
)
from trial_lib.command.read_options import read_options
from trial_lib.command.words import Words

TRIAL_CLASS_MODULE = "trial_lib.training"
_TRIAL_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_LONGEST_FIRST_LINE = 4096
_SHELL_FUNCTIONS = ("conda", "mamba", "micromamba", "module", "source", ".")
_OWN_RANKS = "the launcher determined.launch is left out: ZeroTune starts the ranks itself."


def parse_command(words: Words) -> dict[str, Any]:
    """Takes a command off the words, up to the script's own arguments, and returns fields of `Entrypoint`.

    Raises:
        InputError: the command starts something other than Python, has a launcher or interpreter option that ZeroTune
            cannot follow, or names neither script nor trial class.
    """
    if not words:
        raise words.error("it names no command.")
    if _TRIAL_CLASS.fullmatch(words.first):
        return _trial_class(words, words.take())
    command = words.take()
    folder, program = os.path.split(command)
    if program in NONE.programs or (folder and re.fullmatch(r"python3\.\d+", program)):
        return _parse_python(words, command if folder else None)
    launcher = launcher_of_program(program)
    if launcher is not None and (words.follows or launcher.yaml_options is not None):
        _take_rest_of_name(words, launcher.programs, program)
        words.program = command
        return _launched(words, launcher, _interpreter_beside(words, command) if launcher.comes_with_python else None)
    if re.fullmatch(r"python3\.\d+", program):
        raise words.error(
            f"{command} may be another Python than ZeroTune's own.",
            "Write python3 for ZeroTune's own, or the path of yours, such as /opt/env/bin/python.",
        )
    found = started_elsewhere([command, *words.rest])
    if found is not None:
        raise words.error(found.what, found.kind.instead)
    typed = str(words.folder / command) if folder else command
    if words.follows and command[0] != "-" and shutil.which(typed, path=words.environment.get("PATH")) is None:
        raise words.error(f"{command} is not found.", _where_to_look(program))
    raise words.error(f"it begins with {command!r}, which ZeroTune cannot start.")


def _where_to_look(program: str) -> str:
    if program in _SHELL_FUNCTIONS:
        return f"{program} may be a function of your shell: activate the environment, and type what you type in it."
    return "Activate the environment that has it, install it, or type its path."


def take_script(words: Words) -> str:
    """Takes the name of a script, or of a module behind `--module`, off the words.

    Raises:
        InputError: there is none.
    """
    if not words:
        raise words.error("it names no script.")
    script = words.take()
    if script.startswith("-"):
        raise words.error(f"a script's name was expected, not {script}.")
    return script


def read_own(words: Words) -> dict[str, Any]:
    """Reads what follows `python3 -m trial_lib.training`: `--trial module:Class`.

    Raises:
        InputError: no trial class follows.
    """
    if words and words.first.partition("=")[0] == "--trial":
        return _trial_class(words, words.take_value(words.take()))
    raise words.error("trial_lib.training is given no trial class.", "Write `--trial MODULE:CLASS` behind it.")


def _launched(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    found: dict[str, Any] = pkgutil.resolve_name(launcher.read)(words, launcher, interpreter)
    return {"interpreter": interpreter, **found} if launcher.comes_with_python else found


def _take_rest_of_name(words: Words, spellings: tuple[str, ...], first: str) -> None:
    """Takes the words that belong to a launcher's name: `launch` behind `accelerate`."""
    rests = [spelled.split()[1:] for spelled in spellings if spelled.split()[0] == first]
    for rest in rests:
        if words.rest[: len(rest)] == rest:
            del words.rest[: len(rest)]
            return
    raise words.error(
        f"{first} starts a training by `{' '.join([first, *rests[0]])}`.",
        f"Write {' '.join(rests[0])} behind {first}.",
    )


def _interpreter_beside(words: Words, command: str) -> str | None:
    """Returns the Python that a launcher of that path runs in. None stands for ZeroTune's own.

    It is the Python in the launcher's folder, or else the Python that the launcher's first line names.
    """
    folder = os.path.dirname(command)  # noqa: PTH120 a path that begins with ./ is to stay as it is
    if not folder:
        return None
    beside = f"{folder}/python"
    if words.follows and not (words.folder / beside).exists():
        with contextlib.suppress(OSError), (words.folder / command).open("rb") as file:
            named = re.match(rb"#!\s*(/\S+/python[\d.]*)\s*$", file.readline(_LONGEST_FIRST_LINE))
            if named:
                return os.fsdecode(named[1])
    return beside


def _parse_python(words: Words, interpreter: str | None) -> dict[str, Any]:
    options: list[str] = []
    while words and words.first.startswith("-"):
        option = words.take()
        if option == "-m":
            own = {"interpreter": interpreter, "interpreter_options": tuple(options)}
            return {**own, **_parse_module(words, words.take_after("python -m"), interpreter)}
        if option != "-u":
            raise words.error(
                f"the interpreter's option {option} is not supported.", "Leave it out: -u and -m are understood."
            )
        options.append(option)
    return {"interpreter": interpreter, "interpreter_options": tuple(options), "script": take_script(words)}


def _parse_module(words: Words, module: str, interpreter: str | None) -> dict[str, Any]:
    """Reads what follows `python -m MODULE`."""
    if module in _OWN_MODULES:
        return _OWN_MODULES[module](words)
    launcher = launcher_of_module(module)
    if launcher is not None and (words.follows or launcher.yaml_options is not None):
        _take_rest_of_name(words, launcher.modules, module)
        words.program = module
        if module == DEEPSPEED_LAUNCH:
            words.rest = _runner_words(words)
        return _launched(words, launcher, interpreter)
    if not _MODULE.fullmatch(module):
        raise words.error(f"{module!r} is not the name of a module.")
    return {"module": module}


def _runner_words(words: Words) -> list[str]:
    found = runner_words(words.rest)
    if found is None:
        raise words.error(f"{DEEPSPEED_LAUNCH} is given no devices, or several hosts.", "Type `deepspeed` instead.")
    return found


def _trial_class(words: Words, name: str) -> dict[str, Any]:
    if not _TRIAL_CLASS.fullmatch(name):
        raise words.error(f"{name!r} is not a trial class.", "Write `--trial MODULE:CLASS`, such as model_def:MyTrial.")
    if words:
        raise words.error(
            f"{words.first} follows the trial class {name}, which takes no arguments.",
            "Leave it out, and put values under `hyperparameters`.",
        )
    return {"trial_class": name}


def _read_determined(words: Words) -> dict[str, Any]:
    """Reads what follows `python3 -m determined.launch.deepspeed`: a command of its own, or `--trial module:Class`."""
    options = read_options(words, "determined.launch", DETERMINED, last=("--trial", "--"))
    words.notes.append(_OWN_RANKS)
    if "--trial" in options:
        return _trial_class(words, options["--trial"])
    if words and words.first.endswith(".py"):
        return {"script": words.take()}
    return {key: value for key, value in parse_command(words).items() if value is not None and value != ()}


# What Determined's files and ZeroTune's own experiments start. Nobody types these launchers in a shell.
_OWN_MODULES: dict[str, Callable[[Words], dict[str, Any]]] = {
    "determined.launch.deepspeed": _read_determined,
    "determined.launch.torch_distributed": _read_determined,
    TRIAL_CLASS_MODULE: read_own,
}
