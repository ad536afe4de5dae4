"""The entrypoint: the user's command in its parts, so that ZeroTune can start its ranks. No shell reads it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trial_lib.command.parse_command import parse_command
from trial_lib.command.words import ASSIGNMENT, Words, split_command

CONFIG_FLAGS = ("--deepspeed", "--deepspeed_config")
"""The flags that give a script the path of its DeepSpeed configuration."""

Slots = int | Literal["all", "gpu", "cpu", "memory_nodes"]
"""How many ranks a command starts: a number, or one for each device (`all`), for each GPU or for each core. With
`memory_nodes` it is one for each GPU, or on a CPU one for each memory node, as `deepspeed` counts without a number."""


class Entrypoint(BaseModel):
    """The user's command.

    Attributes:
        interpreter: path of the Python to run, as the user wrote it. None is ZeroTune's own.
        interpreter_options: options of the interpreter, such as `-u`.
        script: the script, relative to the model directory. None if a module runs.
        module: the module behind `-m`. None if a script runs.
        trial_class: a `DeepSpeedTrial`, as `module:Class`. None if a script or a module runs.
        arguments: the script's arguments, byte for byte.
        config_positions: the positions of the arguments that name the user's DeepSpeed configuration.
        config_variables: the environment variables that name it.
        environment: the assignments before the command.
        launcher: the words before the arguments, as the user typed them, without the assignments.
        launched_by: the name of the launcher among them, as in `LAUNCHERS`. None if there is none.
        launcher_environment: the variables that the launcher would set for the ranks.
        launcher_defaults: those of them that a variable of the shell replaces.
        passed_variables: the variables of the shell that the launcher hands to the ranks, as patterns of `fnmatch`.
        slots: how many ranks the command starts. None if its words do not give the number.
        devices: the devices that the launcher's options choose, by their numbers on this host. None is any.
        excluded_devices: the devices that the launcher's options exclude.
        hosts: the slots of each host in the launcher's hostfile, if there are several hosts.
        local_rank_option: the option in front of the arguments by which the launcher passes the local rank, such as
            `--local_rank` of `deepspeed`. Empty if it passes none.
        notes: one sentence for each part of the command that was left out.
        wrapper: the words that the user typed, if they start this command from the same folder.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    interpreter: str | None = None
    interpreter_options: tuple[str, ...] = ()
    script: str | None = None
    module: str | None = None
    trial_class: str | None = None
    arguments: tuple[str, ...] = ()
    config_positions: tuple[int, ...] = ()
    config_variables: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    launched_by: str | None = None
    launcher_environment: dict[str, str] = Field(default_factory=dict)
    launcher_defaults: tuple[str, ...] = ()
    passed_variables: tuple[str, ...] = ("*",)
    slots: Slots | None = None
    devices: tuple[int, ...] | None = None
    excluded_devices: tuple[int, ...] = ()
    hosts: dict[str, int] = Field(default_factory=dict)
    local_rank_option: str = ""
    notes: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()

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

    Args:
        command: one line, or a list of words.
        deepspeed_config: path of the user's DeepSpeed configuration. An argument with this path names the
            configuration, whatever its flag.
        where: the place that errors name.
        folder: the folder of the command's relative paths.
        shell: the environment of the shell that the command was typed in. The launcher's options and variables then
            count. None leaves the options out, with a note each, because a YAML says how many ranks start.

    Raises:
        InputError: the command needs a shell, starts something other than Python, has a launcher or interpreter
            option that ZeroTune cannot follow, or names neither script nor trial class.

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
    """Takes the assignments before the command off the words, with `env` or without it."""
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
