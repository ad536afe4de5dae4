"""The entrypoint: the user's command in its parts, so that ZeroTune can start its ranks. No shell reads it.

The readers of launchers are at the end.
"""

import contextlib
import importlib.util
import os
import pkgutil
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from zerotune.trial_lib.inputs.elsewhere import started_elsewhere
from zerotune.trial_lib.inputs.launchers import (
    DEEPSPEED_LAUNCH,
    DETERMINED,
    NONE,
    TORCH_LAUNCH,
    UserLauncher,
    followed,
    launcher_of_module,
    launcher_of_program,
    runner_words,
)
from zerotune.trial_lib.inputs.words import ASSIGNMENT, Words, options_from_environment, read_options, split_command
from zerotune.trial_lib.messages.files import read_bounded

# Reading a command: a Python program that starts by itself or by a launcher.

TRIAL_CLASS_MODULE = "zerotune.trial_lib.training"
TRIAL_CLASS_MODULES = (TRIAL_CLASS_MODULE, "trial_lib.training")  # the second by the alias
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
    """Reads what follows `python3 -m zerotune.trial_lib.training`. Raises InputError: no trial class follows."""
    if words and words.first.partition("=")[0] == "--trial":
        return _trial_class(words, words.take_value(words.take()))
    raise words.error(f"{TRIAL_CLASS_MODULE} is given no trial class.", "Write `--trial MODULE:CLASS` behind it.")


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
    **dict.fromkeys(TRIAL_CLASS_MODULES, read_own),
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


# The readers of `deepspeed` and `torchrun`.

# torch/distributed/launch.py has one more option. Without it each rank is told its local rank.
_USE_ENV = "--use_env"
_OLDER = {_USE_ENV: followed(has_value=False)}
_ONE_EACH = {"auto": "all", "gpu": "gpu", "cpu": "cpu"}


def read_deepspeed(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    table = launcher.options if words.follows else launcher.yaml_options
    options = read_options(words, launcher.name, table or {})
    name = take_script(words)
    if "--module" in options and name in TRIAL_CLASS_MODULES:
        return read_own(words)
    found: dict[str, Any] = {
        ("module" if "--module" in options else "script"): name,
        "local_rank_option": "" if "--no_local_rank" in options else "--local_rank",
    }
    return {**found, "launched_by": launcher.name, **deepspeed_slots(words, options)} if words.follows else found


def read_torchrun(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Reads `[options] script.py` behind `torchrun`. Its options may be spelt with dashes or underscores."""
    options = options_from_environment(words, launcher.name, launcher.options) if words.follows else {}
    is_older = words.program == TORCH_LAUNCH
    table = {**((launcher.options if words.follows else launcher.yaml_options) or {}), **(_OLDER if is_older else {})}
    options.update(read_options(words, launcher.name, table, is_dash_underscore=True))
    found: dict[str, Any] = {("module" if "--module" in options else "script"): take_script(words)}
    if is_older and _USE_ENV not in options:
        found["local_rank_option"] = "--local-rank"
    if not words.follows:
        return found
    count = options.get("--nproc_per_node", "1")
    if count not in _ONE_EACH and not (count.isdecimal() and int(count) > 0):
        raise words.error(
            f"--nproc_per_node {count} is no number of processes.", "Write a number above 0, gpu, cpu or auto."
        )
    return {**found, "launched_by": launcher.name, "slots": _ONE_EACH.get(count) or int(count)}


# The readers of launchers that start a whole command: `mpirun`, `srun`, and any that only counts its ranks.

_INSTEAD = "Or type `zerotune tune -- torchrun --nproc_per_node N SCRIPT ARGUMENTS`."
_EXPORTS = ("-x", "--x")
_VARIABLES = ("-genv", "-env")
_NO_VARIABLES, _THESE_VARIABLES = "-genvnone", "-genvlist"
_PARAMETERS = ("--mca", "-mca", "--gmca", "-gmca", "--prtemca", "--pmixmca")


def read_counted(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Reads `[options] command` behind a launcher whose options say how many ranks start; InputError if none does."""
    found = read_options(words, launcher.name, launcher.options)
    return _ranks(words, launcher, _count_in(found, words, launcher), {})


def read_mpirun(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Raises InputError: the ranks are to start on other hosts, there are several programs, or none says how many."""
    found: dict[str, str] = {}
    variables: dict[str, str] = {}
    while words and words.first.startswith("-"):
        if words.first in _EXPORTS:
            name, equals, value = words.take_after(words.take()).partition("=")
            variables |= {name: value} if equals else {}
        elif words.first in _VARIABLES:
            name = words.take_after(words.take())
            variables[name] = words.take_after(name)
        elif words.first in _PARAMETERS:
            shown = [words.take() for _ in range(min(3, len(words.rest)))]
            words.notes.append(f"{' '.join(shown)} is left out: the ranks are started without MPI.")
        else:
            found |= read_options(words, launcher.name, launcher.options, last=tuple(launcher.options))
    passed = found.get(_THESE_VARIABLES, "" if _NO_VARIABLES in found else "*")
    if ":" in words.rest:
        raise words.error("mpirun is told of several programs.", f"Start one. {_INSTEAD}")
    for host in filter(None, found.get("--host", "").split(",")):
        refuse_foreign(words, "--host", host.partition(":")[0])
    return _ranks(words, launcher, _count_in(found, words, launcher), variables, passed.split(","))


def read_srun(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Raises InputError: Slurm would start the ranks on other hosts."""
    found = read_options(words, launcher.name, launcher.options)
    slurm = words.environment
    if "SLURM_JOB_ID" not in slurm:
        what = "srun would have Slurm start the ranks on other machines than this one."
        raise words.error(what, f"Type it within an allocation: `salloc OPTIONS zerotune tune -- srun ...`. {_INSTEAD}")
    nodes = slurm.get("SLURM_JOB_NUM_NODES", slurm.get("SLURM_NNODES", "1"))
    if "--nodes" not in found and nodes != "1":
        raise words.error(f"the allocation has {nodes} nodes, and a search runs on one.", f"Add -N 1. {_INSTEAD}")
    exported = found.get("--export", slurm.get("SLURM_EXPORT_ENV", "ALL")).split(",")
    variables = {name: value for name, equals, value in (item.partition("=") for item in exported) if equals}
    passed = ["*"] if "ALL" in exported else exported
    counted = {launcher.count[0]: slurm.get("SLURM_NTASKS", "1")} if found.keys().isdisjoint(launcher.count) else found
    return _ranks(words, launcher, _count_in(counted, words, launcher), variables, passed)


def _count_in(found: dict[str, str], words: Words, launcher: UserLauncher) -> int:
    count = next((found[flag] for flag in launcher.count if flag in found), None)
    if count is None:
        example = f"`{launcher.shown} {launcher.count[0]} N`"
        raise words.error(f"{launcher.name} is not told how many ranks to start.", f"Say it: {example}. {_INSTEAD}")
    if not (count.isdecimal() and int(count) > 0):
        raise words.error(f"{launcher.name} is told to start {count} ranks.", "Write a number above 0.")
    return int(count)


def _ranks(
    words: Words, launcher: UserLauncher, count: int, variables: dict[str, str], passed: Sequence[str] = ("*",)
) -> dict[str, Any]:
    """Reads the command that a launcher starts `count` times. `passed` are patterns of variables it hands on."""
    words.environment |= variables
    inner = parse_command(words)
    launched = {
        "launcher_environment": {**inner.get("launcher_environment", {}), **variables},
        "launcher_defaults": tuple(name for name in inner.get("launcher_defaults", ()) if name not in variables),
        "passed_variables": tuple(passed),
    }
    if inner.get("launched_by") is None:
        words.notes.append(f"{launcher.name} is left out: ZeroTune starts the ranks itself, without MPI.")
        return {**inner, **launched, "launched_by": launcher.name, "slots": count}
    if count > 1:
        raise words.error(
            f"{launcher.name} starts {inner['launched_by']} {count} times.", f"Leave one of the two out. {_INSTEAD}"
        )
    words.notes.append(f"{launcher.name} is left out: it starts {inner['launched_by']} once.")
    return {**inner, **launched}


# The devices that `deepspeed` uses, by its hostfile, `--include`, `--exclude` or a number.

DEFAULT_HOSTFILE = Path("/job/hostfile")
# Of variables, `deepspeed` hands these to the ranks of several hosts (deepspeed/launcher/runner.py, `export_envs` of
# deepspeed/accelerator/cuda_accelerator.py), with those in a file of the home or the working directory.
_PASSED = ("MLFLOW*", "PYTHON*", "MV2*", "UCX*", "NCCL*")
_VARIABLES_FILE = ".deepspeed_env"
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def deepspeed_slots(words: Words, options: Mapping[str, str]) -> dict[str, Any]:
    """Returns how many ranks `deepspeed` starts and on which devices, as fields of `Entrypoint`.
    Raises InputError: the options name another host alone or some devices of several hosts, contradict each other, or
    are misspelt.
    """
    chosen = [flag for flag in ("--include", "--exclude", "--num_gpus") if flag in options]
    if len(chosen) > 1:
        raise words.error(f"{chosen[0]} and {chosen[1]} exclude each other.", f"Leave {chosen[1]} out.")
    hosts = _first_hosts(words, _hosts_in_file(words, options.get("--hostfile")), options.get("--num_nodes"))
    if len(hosts) > 1:
        if chosen:
            what = f"{chosen[0]} chooses among the slots of {len(hosts)} hosts ({', '.join(hosts)})."
            raise words.error(what, f"Leave {chosen[0]} out, and name in the hostfile what a trial is to have.")
        return {
            "slots": sum(hosts.values()),
            "hosts": hosts,
            "launcher_environment": _variables_in_file(words),
            "passed_variables": _PASSED,
        }
    host = next(iter(hosts.items()), None)
    if host is not None:
        refuse_foreign(words, "the hostfile", host[0])
    slots = None if host is None else host[1]
    count = _num_gpus(words, options.get("--num_gpus", "-1"))
    if count is not None:
        return {"slots": count}
    if "--include" in options:
        devices = _named_devices(words, "--include", options["--include"], host)
        # A host's name alone means all its devices.
        return {"slots": len(devices), "devices": devices} if devices else {"slots": slots or "memory_nodes"}
    if "--exclude" in options:
        excluded = _named_devices(words, "--exclude", options["--exclude"], host)
        if not excluded:
            raise words.error("--exclude leaves no device.", "Name the devices to leave out, as in localhost:0.")
        if slots is not None:
            left = tuple(device for device in range(slots) if device not in excluded)
            return {"slots": len(left), "devices": left}
        return {"slots": "all", "excluded_devices": excluded}
    return {"slots": slots or "memory_nodes"}


def _num_gpus(words: Words, text: str) -> int | None:
    # None means all.
    try:
        count = int(text)
    except ValueError:
        raise words.error(f"--num_gpus {text} is no number.", "Write a whole number above 0.") from None
    return count if count > 0 else None


def _first_hosts(words: Words, hosts: dict[str, int], asked: str | None) -> dict[str, int]:
    # The first hosts, as many as `--num_nodes` asks for.
    if asked is None or (asked == "-1" and hosts):
        return hosts
    if len(hosts) < 2 and asked in ("1", "-1"):
        words.notes.append(f"--num_nodes {asked} is left out: a trial runs on one node.")
        return hosts
    if not hosts:
        raise words.error(f"--num_nodes {asked} asks for several nodes.", "Name them in a file, by --hostfile.")
    if not asked.isdecimal() or not 0 < int(asked) <= len(hosts):
        raise words.error(f"--num_nodes {asked} is not between 1 and the {len(hosts)} host(s) of the hostfile.")
    return dict(list(hosts.items())[: int(asked)])


def _hosts_in_file(words: Words, named: str | None) -> dict[str, int]:
    # The slots of each host in the hostfile, by name. Empty if there is no hostfile.
    path = DEFAULT_HOSTFILE if named is None else words.folder / named
    if named is None and not path.is_file():
        return {}
    leave_out = f"Write one line for each host, `NAME slots=N`, or {'leave --hostfile out' if named else 'remove it'}."
    try:
        lines = [line.strip() for line in read_bounded(path).splitlines()]
    except (OSError, ValueError) as error:
        raise words.error(f"the hostfile {path} cannot be read ({_why_unread(error)}).", leave_out) from None
    hosts: dict[str, int] = {}
    for line in lines:
        match = _LINE.match(line)
        if match:
            if match[1] in hosts:
                raise words.error(f"the hostfile {path} names {match[1]} twice.", leave_out)
            hosts[match[1]] = int(match[2])
        elif line and not line.startswith("#"):
            raise words.error(f"the hostfile {path} has the line {line!r}.", leave_out)
    if not hosts:
        raise words.error(f"the hostfile {path} names no host.", leave_out)
    for host, slots in hosts.items():
        if slots < 1:
            raise words.error(f"the hostfile {path} gives {host} no slots.", leave_out)
    return hosts


def _why_unread(error: Exception) -> str:
    return "it is not UTF-8" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or str(error)


def _variables_in_file(words: Words) -> dict[str, str]:
    # The variables that `deepspeed` sets for the ranks of several hosts.
    name = words.environment.get("DS_ENV_FILE", _VARIABLES_FILE)
    found: dict[str, str] = {}
    for path in (Path("~").expanduser() / name, words.folder / name):
        try:
            lines = path.read_text().splitlines() if path.is_file() else []
        except (OSError, ValueError) as error:
            what = f"{path} cannot be read ({_why_unread(error)})."
            raise words.error(what, "Write one line for each variable.") from None
        for line in lines:
            variable, equals, value = line.partition("=")
            if not equals:
                raise words.error(f"{path} has the line {line!r}.", "Write NAME=VALUE.")
            found[variable.strip()] = value.strip()
    return found


def _named_devices(words: Words, flag: str, text: str, host: tuple[str, int] | None) -> tuple[int, ...]:
    # The devices that `HOST:0,1` names. Empty if it names the host alone.
    name, colon, listed = text.partition(":")
    if host is None or name != host[0]:
        refuse_foreign(words, flag, text.partition("@")[2].partition(":")[0] or name)
    if "@" in text:
        raise words.error(f"{flag} {text} names several hosts: a search runs on one.", "Name localhost alone.")
    if not colon:
        return ()
    try:
        devices = tuple(sorted({int(device) for device in listed.split(",")}))
    except ValueError:
        devices = (-1,)
    if devices[0] < 0:
        raise words.error(f"{flag} {text} names no devices.", "Write it as in localhost:0,1.")
    if host is not None and devices[-1] >= host[1]:
        raise words.error(f"{flag} {text} names a device that the hostfile has not.", "Name others.")
    return devices


def refuse_foreign(words: Words, place: str, host: str) -> None:
    """Raises InputError: the host is not this one."""
    own = socket.gethostname()
    if host in ("localhost", "127.0.0.1") or host.partition(".")[0] == own.partition(".")[0]:
        return
    what = f"{place} names the host {host}, and a search runs on this one, {own}."
    raise words.error(what, "Run zerotune there, or name localhost.")
