"""The readers of `deepspeed` and `torchrun`."""

from collections.abc import Sequence
from typing import Any

from trial_lib.inputs.deepspeed_hosts import deepspeed_slots, refuse_foreign
from trial_lib.inputs.entrypoint import TRIAL_CLASS_MODULE, parse_command, read_own, take_script
from trial_lib.inputs.launchers import TORCH_LAUNCH, UserLauncher, followed
from trial_lib.inputs.words import Words, options_from_environment, read_options

# torch/distributed/launch.py has one more option. Without it each rank is told its local rank.
_USE_ENV = "--use_env"
_OLDER = {_USE_ENV: followed(has_value=False)}
_DEVICES = {"auto": "all", "gpu": "gpu", "cpu": "cpu"}


def read_deepspeed(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Reads `[options] script.py` behind `deepspeed`."""
    table = launcher.options if words.follows else launcher.yaml_options
    options = read_options(words, launcher.name, table or {})
    name = take_script(words)
    if "--module" in options and name == TRIAL_CLASS_MODULE:
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
    if count not in _DEVICES and not (count.isdecimal() and int(count) > 0):
        raise words.error(
            f"--nproc_per_node {count} is no number of processes.", "Write a number above 0, gpu, cpu or auto."
        )
    return {**found, "launched_by": launcher.name, "slots": _DEVICES.get(count) or int(count)}


# The readers of launchers that start a whole command: `mpirun`, `srun`, and any that only counts its ranks.


_INSTEAD = "Or type `zerotune tune -- torchrun --nproc_per_node N SCRIPT ARGUMENTS`."
_EXPORTS = ("-x", "--x")
_VARIABLES = ("-genv", "-env")
_NO_VARIABLES, _THESE_VARIABLES = "-genvnone", "-genvlist"
_PARAMETERS = ("--mca", "-mca", "--gmca", "-gmca", "--prtemca", "--pmixmca")


def read_counted(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Reads `[options] command` behind a launcher whose options say how many ranks start.

    Raises:
        InputError: no option says how many ranks, or an option cannot be followed.
    """
    found = read_options(words, launcher.name, launcher.options)
    return _ranks(words, launcher, _count_in(found, words, launcher), {})


def read_mpirun(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Reads `[options] command` behind `mpirun`.

    Raises:
        InputError: the ranks are to start on other hosts, there are several programs, or no option says how many ranks.
    """
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
    """Reads `[options] command` behind `srun`.

    Raises:
        InputError: Slurm would start the ranks on other hosts.
    """
    found = read_options(words, launcher.name, launcher.options)
    slurm = words.environment
    if "SLURM_JOB_ID" not in slurm:
        raise words.error(
            "srun would have Slurm start the ranks on other machines than this one.",
            f"Type it within an allocation: `salloc OPTIONS zerotune tune -- srun ...`. {_INSTEAD}",
        )
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
    """Reads the command that a launcher starts `count` times.

    Args:
        words: of that command.
        launcher: the launcher.
        count: the number of ranks.
        variables: the variables that its options set.
        passed: the variables of the shell that it hands on, as patterns.
    """
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
