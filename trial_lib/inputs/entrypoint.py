"""The entrypoint: the user's command in its parts, so that ZeroTune can start its ranks. No shell reads it."""

import contextlib
import importlib.util
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trial_lib.inputs.elsewhere import started_elsewhere
from trial_lib.inputs.launcher_process import runner_words
from trial_lib.inputs.launchers import (
    DEEPSPEED_LAUNCH,
    DETERMINED,
    NONE,
    UserLauncher,
    launcher_of_module,
    launcher_of_program,
)
from trial_lib.inputs.words import ASSIGNMENT, Words, read_options, split_command

# Reading a command: a Python program that starts by itself or by a launcher.

TRIAL_CLASS_MODULE = "trial_lib.training"
_TRIAL_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_LONGEST_FIRST_LINE = 4096
_SHELL_FUNCTIONS = ("conda", "mamba", "micromamba", "module", "source", ".")


def default_interpreter() -> str:
    """The Python of a command that names none by a path: ZeroTune's own, or that of the shell's environment if
    ZeroTune is installed apart from DeepSpeed.
    """
    if importlib.util.find_spec("deepspeed") is not None:
        return sys.executable
    return shutil.which("python") or shutil.which("python3") or sys.executable


def parse_command(words: Words) -> dict[str, Any]:
    """Takes a command off the words, up to the script's own arguments, and returns fields of `Entrypoint`.
    Raises InputError: the command starts something other than Python, has a launcher or interpreter option that
    ZeroTune cannot follow, or names neither script nor trial class.
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
        what = f"{command} may be another Python than ZeroTune's own."
        raise words.error(what, "Write python3 for ZeroTune's own, or the path of yours, such as /opt/env/bin/python.")
    found = started_elsewhere([command, *words.rest])
    if found is not None:
        raise words.error(found.what, found.kind.instead)
    typed = str(words.folder / command) if folder else command
    if words.follows and command[0] != "-" and shutil.which(typed, path=words.environment.get("PATH")) is None:
        remedy = "Activate the environment that has it, install it, or type its path."
        if program in _SHELL_FUNCTIONS:
            what = f"{program} may be a function of your shell"
            remedy = f"{what}: activate the environment, and type what you type in it."
        raise words.error(f"{command} is not found.", remedy)
    raise words.error(f"it begins with {command!r}, which ZeroTune cannot start.")


def take_script(words: Words) -> str:
    """Takes the name of a script, or of a module behind `--module`. Raises InputError: there is none."""
    if not words:
        raise words.error("it names no script.")
    script = words.take()
    if script.startswith("-"):
        raise words.error(f"a script's name was expected, not {script}.")
    return script


def read_own(words: Words) -> dict[str, Any]:
    """Reads what follows `python3 -m trial_lib.training`. Raises InputError: no trial class follows."""
    if words and words.first.partition("=")[0] == "--trial":
        return _trial_class(words, words.take_value(words.take()))
    raise words.error("trial_lib.training is given no trial class.", "Write `--trial MODULE:CLASS` behind it.")


def _launched(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    found: dict[str, Any] = pkgutil.resolve_name(launcher.read)(words, launcher, interpreter)
    return {"interpreter": interpreter, **found} if launcher.comes_with_python else found


def _take_rest_of_name(words: Words, spellings: tuple[str, ...], first: str) -> None:
    # Takes the words that belong to a launcher's name: `launch` behind `accelerate`.
    rests = [spelled.split()[1:] for spelled in spellings if spelled.split()[0] == first]
    for rest in rests:
        if words.rest[: len(rest)] == rest:
            del words.rest[: len(rest)]
            return
    raise words.error(
        f"{first} starts a training by `{' '.join([first, *rests[0]])}`.", f"Write {' '.join(rests[0])} behind {first}."
    )


def _interpreter_beside(words: Words, command: str) -> str | None:
    """Returns the Python in the launcher's folder, or that its first line names; None for `default_interpreter`."""
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
    # Reads what follows `python -m MODULE`.
    if module in _OWN_MODULES:
        return _OWN_MODULES[module](words)
    launcher = launcher_of_module(module)
    if launcher is not None and (words.follows or launcher.yaml_options is not None):
        _take_rest_of_name(words, launcher.modules, module)
        words.program = module
        if module == DEEPSPEED_LAUNCH:
            found = runner_words(words.rest)
            if found is None:
                what = f"{DEEPSPEED_LAUNCH} is given no devices, or several hosts."
                raise words.error(what, "Type `deepspeed` instead.")
            words.rest = found
        return _launched(words, launcher, interpreter)
    if not _MODULE.fullmatch(module):
        raise words.error(f"{module!r} is not the name of a module.")
    return {"module": module}


def _trial_class(words: Words, name: str) -> dict[str, Any]:
    if not _TRIAL_CLASS.fullmatch(name):
        raise words.error(f"{name!r} is not a trial class.", "Write `--trial MODULE:CLASS`, such as model_def:MyTrial.")
    if words:
        what = f"{words.first} follows the trial class {name}, which takes no arguments."
        raise words.error(what, "Leave it out, and put values under `hyperparameters`.")
    return {"trial_class": name}


def _read_determined(words: Words) -> dict[str, Any]:
    # Reads what follows `python3 -m determined.launch.deepspeed`: a command of its own, or `--trial module:Class`.
    options = read_options(words, "determined.launch", DETERMINED, last=("--trial", "--"))
    words.notes.append("the launcher determined.launch is left out: ZeroTune starts the ranks itself.")
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


# The flags that give a script the path of its DeepSpeed configuration.
CONFIG_FLAGS = ("--deepspeed", "--deepspeed_config")

Slots = int | Literal["all", "gpu", "cpu", "memory_nodes"]
"""How many ranks a command starts: a number, or one for each device (`all`), for each GPU or for each core. With
`memory_nodes` it is one for each GPU, or on a CPU one for each memory node, as `deepspeed` counts without a number."""


class Entrypoint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    interpreter: str | None = None  # path of the Python to run, as the user wrote it. None is `default_interpreter`.
    interpreter_options: tuple[str, ...] = ()  # options of the interpreter, such as `-u`
    script: str | None = None  # the script, relative to the model directory. None if a module runs.
    module: str | None = None  # the module behind `-m`. None if a script runs.
    trial_class: str | None = None  # a `DeepSpeedTrial`, as `module:Class`. None if a script or a module runs.
    arguments: tuple[str, ...] = ()  # the script's arguments, byte for byte
    # The positions of the arguments that name the user's DeepSpeed configuration
    config_positions: tuple[int, ...] = ()
    config_variables: tuple[str, ...] = ()  # the environment variables that name it
    environment: dict[str, str] = Field(default_factory=dict)  # the assignments before the command
    launcher: tuple[str, ...] = ()  # the words before the arguments, as the user typed them, without the assignments
    launched_by: str | None = None  # the name of the launcher among them, as in `LAUNCHERS`. None if there is none.
    # The variables that the launcher would set for the ranks
    launcher_environment: dict[str, str] = Field(default_factory=dict)
    launcher_defaults: tuple[str, ...] = ()  # those of them that a variable of the shell replaces
    # The variables of the shell that the launcher hands to the ranks, as patterns of `fnmatch`
    passed_variables: tuple[str, ...] = ("*",)
    slots: Slots | None = None  # how many ranks the command starts. None if its words do not give the number.
    # The devices that the launcher's options choose, by their numbers on this host. None is any.
    devices: tuple[int, ...] | None = None
    excluded_devices: tuple[int, ...] = ()  # the devices that the launcher's options exclude
    # The slots of each host in the launcher's hostfile, if there are several hosts
    hosts: dict[str, int] = Field(default_factory=dict)
    # The option in front of the arguments by which the launcher passes the local rank, such as `--local_rank` of
    # `deepspeed`. Empty if it passes none.
    local_rank_option: str = ""
    notes: tuple[str, ...] = ()  # one sentence for each part of the command that was left out
    wrapper: tuple[str, ...] = ()  # the words that the user typed, if they start this command from the same folder

    @property
    def config_values(self) -> tuple[str, ...]:
        """The paths by which arguments and environment name a DeepSpeed configuration."""
        variables = {**self.environment, **self.launcher_environment}
        named = [variables[name] for name in self.config_variables if name in variables]
        return (*(split_flag(self.arguments[position])[1] for position in self.config_positions), *named)


def parse_entrypoint(
    command: str | Sequence[str],
    *,
    deepspeed_config: str | None = None,
    where: str = "entrypoint",
    folder: Path = Path(),
    shell: Mapping[str, str] | None = None,
) -> Entrypoint:
    """Returns the user's command in its parts.
    Raises InputError: the command needs a shell, starts something other than Python, has a launcher or interpreter
    option that ZeroTune cannot follow, or names neither script nor trial class.

    Args:
        deepspeed_config: path of the user's DeepSpeed configuration. An argument with this path names the
            configuration, whatever its flag.
        shell: the environment of the shell that the command was typed in. The launcher's options and variables then
            count. None leaves the options out, with a note each, because a YAML says how many ranks start.

    Example:
        >>> parse_entrypoint("deepspeed --num_gpus 2 train.py --lr 0.1").arguments
        ('--lr', '0.1')
    """
    typed = split_command(command, where) if isinstance(command, str) else list(command)
    words = Words(typed.copy(), where, follows=shell is not None, environment=shell, folder=folder)
    assigned = _assignments(words)
    words.environment |= assigned
    begin = len(typed) - len(words.rest)
    found: dict[str, Any] = parse_command(words)
    arguments = tuple(words.rest)
    return Entrypoint(
        **found,
        arguments=arguments,
        config_positions=_config_positions(arguments, deepspeed_config),
        environment=assigned,
        launcher=tuple(typed[begin : len(typed) - len(arguments)]) if words.follows else (),
        notes=tuple(words.notes),
    )


def with_config(entrypoint: Entrypoint, deepspeed_config: str | None) -> Entrypoint:
    """Returns the command with the positions of the arguments that are the path of the DeepSpeed configuration."""
    return entrypoint.model_copy(update={"config_positions": _config_positions(entrypoint.arguments, deepspeed_config)})


def _assignments(words: Words) -> dict[str, str]:
    # Takes the assignments before the command off the words, with `env` or without it.
    if words.follows and words and os.path.basename(words.first) == "env":  # noqa: PTH119
        words.take()
    assigned: dict[str, str] = {}
    while words and ASSIGNMENT.match(words.first):
        name, _, value = words.take().partition("=")
        assigned[name] = value
    return assigned


def split_flag(argument: str) -> tuple[str, str]:
    """Returns `--flag=` and the value of `--flag=value`, or an empty prefix and the whole argument."""
    flag, equals, value = argument.partition("=")
    return (flag + equals, value) if equals and flag.startswith("-") else ("", argument)


def _config_positions(arguments: Sequence[str], deepspeed_config: str | None) -> tuple[int, ...]:
    # Beside `--deepspeed_config FILE`, `--deepspeed` is DeepSpeed's own switch without a value.
    both = any(argument.partition("=")[0] == "--deepspeed_config" for argument in arguments)
    flags = {"--deepspeed_config"} if both else set(CONFIG_FLAGS)

    def names_config(position: int) -> bool:
        prefix, value = split_flag(arguments[position])
        if deepspeed_config is not None and os.path.normpath(value) == os.path.normpath(deepspeed_config):
            return True
        if prefix:
            return prefix[:-1] in flags
        return position > 0 and arguments[position - 1] in flags and not value.startswith("-")

    return tuple(position for position in range(len(arguments)) if names_config(position))
