"""The entrypoint: the user's command, taken apart so that ZeroTune can start its ranks itself. No shell reads it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trial_lib.command.parse_command import parse_command
from trial_lib.command.words import ASSIGNMENT, Words, split_command

CONFIG_FLAGS = ("--deepspeed", "--deepspeed_config")
"""The flags by which a script takes the path of its DeepSpeed configuration."""

Slots = int | Literal["all", "gpu", "cpu", "memory_nodes"]
"""How many ranks a command starts: a number, or one for each device (`all`), for each GPU or for each core. With
`memory_nodes` it is one for each GPU, or on a CPU one for each memory node, as `deepspeed` counts without a number."""


class Entrypoint(BaseModel):
    """The user's command.

    Attributes:
        interpreter: path of the Python to run, as the user wrote it; None is ZeroTune's own.
        interpreter_options: options of the interpreter itself, such as `-u`.
        script: the script, relative to the model directory; None where a module is run.
        module: the module behind `-m`; None where a script is run.
        trial_class: a `DeepSpeedTrial`, as `module:Class`; None where a script or a module is run.
        arguments: what the script is given, byte for byte.
        config_positions: which of the arguments name the user's DeepSpeed configuration.
        config_variables: the environment variables that name it.
        environment: assignments that stood before the command.
        launcher: the words before the arguments, as they were typed, without the assignments.
        launched_by: the name of the launcher among them, as in `LAUNCHERS`. None if there is none.
        launcher_environment: what the launcher would put into the environment of the ranks.
        slots: how many ranks the command starts; None where it does not say.
        devices: the devices that the launcher is told to use, by their numbers on this host; None for any.
        excluded_devices: those that it is told not to use.
        hosts: the hosts that the launcher's hostfile names, each with its slots, where they are several.
        passes_local_rank: whether the script expects `--local_rank=N` as its first argument, as the `deepspeed`
            launcher gives it.
        notes: one sentence for each part of the command that was left out.
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
    slots: Slots | None = None
    devices: tuple[int, ...] | None = None
    excluded_devices: tuple[int, ...] = ()
    hosts: dict[str, int] = Field(default_factory=dict)
    passes_local_rank: bool = False
    notes: tuple[str, ...] = ()

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
    """Returns the user's command, taken apart.

    Args:
        command: as one line, or as a list of words.
        deepspeed_config: path of the user's DeepSpeed configuration: an argument that is this path names it, whatever
            its flag.
        where: how an error names the place.
        folder: what relative paths in the command stand in.
        shell: the environment of the shell that the command was typed in: the launcher's options and variables are
            followed. None leaves its options out, with a note each: something else says how many ranks start.

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
    """Returns the command with the arguments that are the path of the user's DeepSpeed configuration known as such."""
    return entrypoint.model_copy(update={"config_positions": _config_positions(entrypoint.arguments, deepspeed_config)})


def _assignments(words: Words) -> dict[str, str]:
    """Takes the assignments off the words, behind `env` or without it."""
    if words.follows and words and os.path.basename(words.first) == "env":  # noqa: PTH119
        words.take()
    assigned: dict[str, str] = {}
    while words and ASSIGNMENT.match(words.first):
        name, _, value = words.take().partition("=")
        assigned[name] = value
    return assigned


def split_flag(argument: str) -> tuple[str, str]:
    """Returns `--flag=` and the value of `--flag=value`; an empty prefix and the whole of any other argument."""
    flag, equals, value = argument.partition("=")
    return (flag + equals, value) if equals and flag.startswith("-") else ("", argument)


def _config_positions(arguments: Sequence[str], deepspeed_config: str | None) -> tuple[int, ...]:
    # `--deepspeed` alone is DeepSpeed's own on-off flag: it is followed by `--deepspeed_config FILE`.
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
