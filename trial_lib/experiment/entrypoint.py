"""The entrypoint: the user's command, taken apart so that ZeroTune can start its ranks itself.

No shell reads the command. A launcher in it (`deepspeed`, `torchrun`, the predecessor's) is understood and left out:
what it would do, start one process for each device, is ZeroTune's work.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from trial_lib.experiment.command_line import Words, split_command

CONFIG_FLAGS = ("--deepspeed", "--deepspeed_config")
"""The flags by which a script takes the path of its DeepSpeed configuration."""

_OWN_MODULE = "trial_lib.training"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_TRIAL_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


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
        environment: assignments that stood before the command.
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
    environment: dict[str, str] = Field(default_factory=dict)
    passes_local_rank: bool = False
    notes: tuple[str, ...] = ()

    @property
    def config_values(self) -> tuple[str, ...]:
        """The paths by which the arguments name a DeepSpeed configuration."""
        return tuple(_split_flag(self.arguments[position])[1] for position in self.config_positions)


def parse_entrypoint(
    command: str | Sequence[str], *, deepspeed_config: str | None = None, where: str = "entrypoint"
) -> Entrypoint:
    """Returns the user's command, taken apart.

    Args:
        command: as one line, or as a list of words.
        deepspeed_config: path of the user's DeepSpeed configuration: an argument that is this path names it, whatever
            its flag.
        where: how an error names the place.

    Raises:
        InputError: the command needs a shell, starts something other than Python, has a launcher or interpreter
            option that ZeroTune cannot follow, or names neither script nor trial class.

    Example:
        >>> parse_entrypoint("deepspeed --num_gpus 2 train.py --lr 0.1").arguments
        ('--lr', '0.1')
    """
    words = Words(split_command(command, where) if isinstance(command, str) else list(command), where)
    environment: dict[str, str] = {}
    while words and _ASSIGNMENT.match(words.first):
        name, _, value = words.take().partition("=")
        environment[name] = value

    found: dict[str, Any] = _parse_command(words)
    arguments = tuple(words.rest)
    return Entrypoint(
        **found,
        arguments=arguments,
        config_positions=_config_positions(arguments, deepspeed_config),
        environment=environment,
        notes=tuple(words.notes),
    )


def arguments_for(
    entrypoint: Entrypoint,
    config_path: Path,
    arg_mappings: Mapping[Any, str],
    config_values: Mapping[str, Any],
) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the script's arguments for one trial, and what was replaced in them.

    Args:
        entrypoint: the user's command.
        config_path: the trial's DeepSpeed configuration: it takes the place of the user's.
        arg_mappings: the flag that sets each DeepSpeed key.
        config_values: the trial's DeepSpeed configuration. A mapped key that it leaves out, or leaves "auto", stays as
            the user wrote it.

    Returns:
        The arguments, and a pair (old, new) for each replacement; old is empty for a flag that was added.
    """
    arguments = list(entrypoint.arguments)
    replaced: list[tuple[str, str]] = []
    for position in entrypoint.config_positions:
        old = arguments[position]
        prefix, path = _split_flag(old)
        arguments[position] = f"{prefix}{config_path}"
        replaced.append((path, str(config_path)))
    for key, flag in arg_mappings.items():
        if config_values.get(key, "auto") != "auto":
            arguments, changes = _set_flag(arguments, flag, str(config_values[key]))
            replaced += changes
    return arguments, replaced


def _set_flag(arguments: list[str], flag: str, value: str) -> tuple[list[str], list[tuple[str, str]]]:
    result: list[str] = []
    changes: list[tuple[str, str]] = []
    words = iter(arguments)
    for word in words:
        if word == flag:
            old, new = f"{flag} {next(words, '')}".rstrip(), f"{flag} {value}"
            result += [flag, value]
        elif word.startswith(f"{flag}="):
            old, new = word, f"{flag}={value}"
            result.append(new)
        else:
            result.append(word)
            continue
        changes.append((old, new))
    if not changes:
        result += [flag, value]
        changes.append(("", f"{flag} {value}"))
    return result, changes


def _split_flag(argument: str) -> tuple[str, str]:
    """Returns `--flag=` and the value of `--flag=value`; an empty prefix and the whole of any other argument."""
    flag, equals, value = argument.partition("=")
    return (flag + equals, value) if equals and flag.startswith("-") else ("", argument)


def _config_positions(arguments: Sequence[str], deepspeed_config: str | None) -> tuple[int, ...]:
    # `--deepspeed` alone is DeepSpeed's own on-off flag: it is followed by `--deepspeed_config FILE`.
    both = any(_flag_of(argument) == "--deepspeed_config" for argument in arguments)
    flags = {"--deepspeed_config"} if both else set(CONFIG_FLAGS)

    def names_config(position: int) -> bool:
        prefix, value = _split_flag(arguments[position])
        if deepspeed_config is not None and os.path.normpath(value) == os.path.normpath(deepspeed_config):
            return True
        if prefix:
            return prefix[:-1] in flags
        return position > 0 and arguments[position - 1] in flags and not value.startswith("-")

    return tuple(position for position in range(len(arguments)) if names_config(position))


def _flag_of(argument: str) -> str:
    return argument.partition("=")[0]


def _parse_command(words: Words) -> dict[str, Any]:
    """Returns interpreter, script or module of a command; what follows them stays in `words`."""
    if not words:
        raise words.error("the entrypoint names no command.")
    if _TRIAL_CLASS.fullmatch(words.first):
        return _trial_class(words, words.take())
    command = words.take()
    folder, program = os.path.split(command)
    if program in ("python", "python3") or (folder and re.fullmatch(r"python3\.\d+", program)):
        return _parse_python(words, command if folder else None)
    if program in ("deepspeed", "torchrun"):
        return {"interpreter": f"{folder}/python" if folder else None, **_LAUNCHERS[program](words)}
    if re.fullmatch(r"python3\.\d+", program):
        raise words.error(
            f"{command} may be another Python than ZeroTune's own.",
            "Write python3 for ZeroTune's own, or the path of yours, such as /opt/env/bin/python.",
        )
    raise words.error(f"the entrypoint begins with {command!r}, which ZeroTune cannot start.")


def _parse_python(words: Words, interpreter: str | None) -> dict[str, Any]:
    options: list[str] = []
    while words and words.first.startswith("-"):
        option = words.take()
        if option == "-m":
            module = words.take_after("python -m")
            if module in _LAUNCHERS:
                inner = _LAUNCHERS[module](words)
                return {"interpreter": interpreter, "interpreter_options": tuple(options), **inner}
            if module in ("torch.distributed.launch", "accelerate.commands.launch"):
                raise words.error(f"the launcher {module} is not understood.")
            if not _MODULE.fullmatch(module):
                raise words.error(f"{module!r} is not the name of a module.")
            return {"interpreter": interpreter, "interpreter_options": tuple(options), "module": module}
        if option != "-u":
            raise words.error(
                f"the interpreter's option {option} is not supported.", "Leave it out: -u and -m are understood."
            )
        options.append(option)
    return {"interpreter": interpreter, "interpreter_options": tuple(options), "script": _take_script(words)}


def _take_script(words: Words) -> str:
    if not words:
        raise words.error("the entrypoint names no script.")
    script = words.take()
    if script.startswith("-"):
        raise words.error(f"a script's name was expected, not {script}.")
    return script


def _trial_class(words: Words, name: str) -> dict[str, Any]:
    if not _TRIAL_CLASS.fullmatch(name):
        raise words.error(f"{name!r} is not a trial class.", "Write `--trial MODULE:CLASS`, such as model_def:MyTrial.")
    if words:
        raise words.error(
            f"{words.first} follows the trial class {name}, which takes no arguments.",
            "Leave it out, and put values under `hyperparameters`.",
        )
    return {"trial_class": name}


# What the options of a launcher ask for. Those that ZeroTune decides itself are dropped with a note.
_SLOTS = "resources.slots_per_trial says how many ranks start"
_PORT = "every trial has a port of its own"
_ONE_NODE = "a trial runs on one node"
_LOGS = "every rank has a log of its own"
_CORES = "ZeroTune hands out the cores"
_OWN_RANKS = "the launcher determined.launch is left out: ZeroTune starts the ranks itself."
_DEEPSPEED_DROPPED = {
    "--num_gpus": _SLOTS,
    "--num_accelerators": _SLOTS,
    "--master_port": _PORT,
    "--master_addr": _PORT,
}
_DEEPSPEED_SWITCHES = {
    "--enable_each_rank_log": _LOGS,
    "--bind_cores_to_rank": _CORES,
    "--no_ssh_check": _ONE_NODE,
}
_TORCHRUN_DROPPED = {
    "--nproc_per_node": _SLOTS,
    "--master_port": _PORT,
    "--master_addr": _PORT,
    "--rdzv_backend": _PORT,
    "--rdzv_endpoint": _PORT,
    "--rdzv_id": _PORT,
}


def _parse_deepspeed(words: Words) -> dict[str, Any]:
    """Reads `deepspeed [options] script.py`."""
    module = False
    passes_local_rank = True
    while words and words.first.startswith("-"):
        option = words.take()
        if option == "--module":
            module = True
        elif option == "--no_local_rank":
            passes_local_rank = False
        elif option in _DEEPSPEED_SWITCHES:
            words.notes.append(f"{option} is left out: {_DEEPSPEED_SWITCHES[option]}.")
        else:
            _drop(words, "deepspeed", option, _DEEPSPEED_DROPPED, nodes="--num_nodes")
    name = _take_script(words)
    if module and name == _OWN_MODULE:
        return _parse_own(words)
    return {("module" if module else "script"): name, "passes_local_rank": passes_local_rank}


def _parse_torchrun(words: Words) -> dict[str, Any]:
    """Reads `torchrun [options] script.py`; its options may be spelt with dashes or underscores."""
    module = False
    while words and words.first.startswith("-"):
        option = words.take()
        flag, equals, value = option.partition("=")
        option = "--" + flag.lstrip("-").replace("-", "_") + equals + value if flag.startswith("--") else option
        if option in ("-m", "--module"):
            module = True
        elif option == "--standalone":
            words.notes.append(f"--standalone is left out: {_ONE_NODE}.")
        else:
            _drop(words, "torchrun", option, _TORCHRUN_DROPPED, nodes="--nnodes")
    return {("module" if module else "script"): _take_script(words)}


def _parse_predecessor(words: Words) -> dict[str, Any]:
    """Reads what follows `python3 -m determined.launch.deepspeed`: a command of its own, or `--trial module:Class`."""
    while words and words.first.startswith("-"):
        option = words.take()
        if _flag_of(option) == "--trial":
            words.notes.append(_OWN_RANKS)
            return _trial_class(words, words.take_value(option))
        if option != "--":
            _drop(words, "determined.launch", option, _DEEPSPEED_DROPPED | _TORCHRUN_DROPPED, nodes="--num_nodes")
    words.notes.append(_OWN_RANKS)
    if words and words.first.endswith(".py"):
        return {"script": words.take()}
    return {key: value for key, value in _parse_command(words).items() if value is not None and value != ()}


def _parse_own(words: Words) -> dict[str, Any]:
    """Reads what follows `python3 -m trial_lib.training`: `--trial module:Class`."""
    if words and _flag_of(words.first) == "--trial":
        return _trial_class(words, words.take_value(words.take()))
    raise words.error("trial_lib.training is given no trial class.", "Write `--trial MODULE:CLASS` behind it.")


def _drop(words: Words, launcher: str, option: str, dropped: Mapping[str, str], *, nodes: str) -> None:
    """Leaves out an option that ZeroTune decides itself, with a note; refuses any other by name."""
    flag = _flag_of(option)
    if flag in dropped:
        value = words.take_value(option)
        words.notes.append(f"{flag} {value} is left out: {dropped[flag]}.")
    elif flag == nodes and (count := words.take_value(option)) in ("1", "1:1"):
        words.notes.append(f"{flag} {count} is left out: {_ONE_NODE}.")
    elif flag == nodes:
        raise words.error(
            f"{flag} {count} asks for several nodes.",
            f"Leave {flag} out: a search runs on one node, with resources.slots_per_trial devices.",
        )
    else:
        raise words.error(
            f"the option {flag} of the launcher {launcher} is not supported.",
            f"Leave it out, or write `python3 SCRIPT ARGUMENTS`: {_SLOTS}.",
        )


_LAUNCHERS: dict[str, Callable[[Words], dict[str, Any]]] = {
    "deepspeed": _parse_deepspeed,
    "deepspeed.launcher.runner": _parse_deepspeed,
    "torchrun": _parse_torchrun,
    "torch.distributed.run": _parse_torchrun,
    "determined.launch.deepspeed": _parse_predecessor,
    "determined.launch.torch_distributed": _parse_predecessor,
    _OWN_MODULE: _parse_own,
}
