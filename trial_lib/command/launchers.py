"""What a command starts: a Python program, by itself or by a launcher.

A launcher (`deepspeed`, `torchrun`, `accelerate launch`, Determined's) is understood and left out: what it would
do, start one process for each device, is ZeroTune's work.
"""

import contextlib
import os
import re
from collections.abc import Callable
from typing import Any

from trial_lib.command.deepspeed_hosts import deepspeed_slots
from trial_lib.command.launcher_options import (
    DEEPSPEED,
    DEEPSPEED_IN_YAML,
    DETERMINED,
    TORCHRUN,
    TORCHRUN_IN_YAML,
    options_from_environment,
    read_options,
)
from trial_lib.command.words import Words

TRIAL_CLASS_MODULE = "trial_lib.training"
CLUSTER_LAUNCHERS = ("mpirun", "mpiexec", "srun")
"""The launchers that come with a cluster, and not with a Python."""
_TRIAL_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_LONGEST_FIRST_LINE = 4096
_OWN_RANKS = "the launcher determined.launch is left out: ZeroTune starts the ranks itself."


def parse_command(words: Words) -> dict[str, Any]:
    """Returns what a command starts, as fields of `Entrypoint`; the script's own arguments stay in `words`.

    Raises:
        InputError: it starts something other than Python, has a launcher or interpreter option that ZeroTune cannot
            follow, or names neither script nor trial class.
    """
    if not words:
        raise words.error("it names no command.")
    if _TRIAL_CLASS.fullmatch(words.first):
        return _trial_class(words, words.take())
    command = words.take()
    folder, program = os.path.split(command)
    if program in ("python", "python3") or (folder and re.fullmatch(r"python3\.\d+", program)):
        return _parse_python(words, command if folder else None)
    if program == "accelerate" and words.follows:
        if not words or words.take() != "launch":
            raise words.error("accelerate starts a training by `accelerate launch`.", "Write launch behind accelerate.")
        return _parse_accelerate(words, _interpreter_beside(words, command))
    if program in ("deepspeed", "torchrun"):
        return {"interpreter": _interpreter_beside(words, command), **_LAUNCHERS[program](words)}
    if program in CLUSTER_LAUNCHERS and words.follows:
        return _parse_of_cluster(words, program)
    if re.fullmatch(r"python3\.\d+", program):
        raise words.error(
            f"{command} may be another Python than ZeroTune's own.",
            "Write python3 for ZeroTune's own, or the path of yours, such as /opt/env/bin/python.",
        )
    raise words.error(f"it begins with {command!r}, which ZeroTune cannot start.")


def _interpreter_beside(words: Words, command: str) -> str | None:
    """Returns the Python that a launcher of that path runs in; None for ZeroTune's own.

    It is the Python in the launcher's folder; where that has none, the one that the launcher's first line names.
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
            module = words.take_after("python -m")
            if module in _LAUNCHERS:
                inner = _LAUNCHERS[module](words)
                return {"interpreter": interpreter, "interpreter_options": tuple(options), **inner}
            if module == "accelerate.commands.launch" and words.follows:
                return {"interpreter_options": tuple(options), **_parse_accelerate(words, interpreter)}
            if module in _OTHER_LAUNCHERS:
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
        raise words.error("it names no script.")
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


def _parse_deepspeed(words: Words) -> dict[str, Any]:
    """Reads `deepspeed [options] script.py`."""
    options = read_options(words, "deepspeed", DEEPSPEED if words.follows else DEEPSPEED_IN_YAML)
    name = _take_script(words)
    if "--module" in options and name == TRIAL_CLASS_MODULE:
        return _parse_own(words)
    found: dict[str, Any] = {
        ("module" if "--module" in options else "script"): name,
        "passes_local_rank": "--no_local_rank" not in options,
    }
    return {**found, "launched_by": "deepspeed", **deepspeed_slots(words, options)} if words.follows else found


def _parse_torchrun(words: Words) -> dict[str, Any]:
    """Reads `torchrun [options] script.py`; its options may be spelt with dashes or underscores."""
    options = options_from_environment(words) if words.follows else {}
    options.update(
        read_options(words, "torchrun", TORCHRUN if words.follows else TORCHRUN_IN_YAML, is_dash_underscore=True)
    )
    found = {("module" if "--module" in options else "script"): _take_script(words)}
    if not words.follows:
        return found
    count = options.get("--nproc_per_node", "1")
    names = {"auto": "all", "gpu": "gpu", "cpu": "cpu"}
    if count not in names and not (count.isdecimal() and int(count) > 0):
        raise words.error(
            f"--nproc_per_node {count} is no number of processes.", "Write a number above 0, gpu, cpu or auto."
        )
    return {**found, "launched_by": "torchrun", "slots": names.get(count) or int(count)}


def _parse_accelerate(words: Words, interpreter: str | None) -> dict[str, Any]:
    """Reads what follows `accelerate launch`."""
    # Only such a command needs it.
    from trial_lib.command.accelerate_launch import parse_accelerate

    found: dict[str, Any] = parse_accelerate(words, interpreter)
    return {"interpreter": interpreter, "launched_by": "accelerate", **found}


def _parse_of_cluster(words: Words, program: str) -> dict[str, Any]:
    """Reads what follows `mpirun`, `mpiexec` or `srun`."""
    # Only such a command needs it.
    from trial_lib.command.cluster_launchers import parse_mpirun, parse_srun

    return parse_srun(words, parse_command) if program == "srun" else parse_mpirun(words, parse_command)


def _parse_determined(words: Words) -> dict[str, Any]:
    """Reads what follows `python3 -m determined.launch.deepspeed`: a command of its own, or `--trial module:Class`."""
    options = read_options(words, "determined.launch", DETERMINED, last=("--trial", "--"))
    words.notes.append(_OWN_RANKS)
    if "--trial" in options:
        return _trial_class(words, options["--trial"])
    if words and words.first.endswith(".py"):
        return {"script": words.take()}
    return {key: value for key, value in parse_command(words).items() if value is not None and value != ()}


def _parse_own(words: Words) -> dict[str, Any]:
    """Reads what follows `python3 -m trial_lib.training`: `--trial module:Class`."""
    if words and words.first.partition("=")[0] == "--trial":
        return _trial_class(words, words.take_value(words.take()))
    raise words.error("trial_lib.training is given no trial class.", "Write `--trial MODULE:CLASS` behind it.")


_LAUNCHERS: dict[str, Callable[[Words], dict[str, Any]]] = {
    "deepspeed": _parse_deepspeed,
    "deepspeed.launcher.runner": _parse_deepspeed,
    "torchrun": _parse_torchrun,
    "torch.distributed.run": _parse_torchrun,
    "determined.launch.deepspeed": _parse_determined,
    "determined.launch.torch_distributed": _parse_determined,
    TRIAL_CLASS_MODULE: _parse_own,
}
_OTHER_LAUNCHERS = ("torch.distributed.launch", "deepspeed.launcher.launch", "accelerate.commands.launch")
