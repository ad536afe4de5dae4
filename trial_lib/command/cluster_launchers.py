"""`mpirun` and `srun` on one host: how many ranks they start, of what. ZeroTune starts these itself, without MPI."""

from collections.abc import Callable
from typing import Any

from trial_lib.command.deepspeed_hosts import refuse_foreign
from trial_lib.command.launcher_options import MPIRUN, SRUN, read_options
from trial_lib.command.words import Words

_INSTEAD = "Or type `zerotune tune -- torchrun --nproc_per_node N SCRIPT ARGUMENTS`."
_EXPORTS = ("-x", "--x")
_VARIABLES = ("-genv", "-env")
_PARAMETERS = ("--mca", "-mca", "--gmca", "-gmca", "--prtemca", "--pmixmca")


def parse_mpirun(words: Words, parse_inner: Callable[[Words], dict[str, Any]]) -> dict[str, Any]:
    """Returns what follows `mpirun` or `mpiexec`, as fields of `Entrypoint`.

    Args:
        words: behind its name.
        parse_inner: reads the command that it starts.

    Raises:
        InputError: it starts ranks on other hosts, or several programs, or does not say how many ranks.
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
            found |= read_options(words, "mpirun", MPIRUN, last=tuple(MPIRUN))
    if ":" in words.rest:
        raise words.error("mpirun is told of several programs.", f"Start one. {_INSTEAD}")
    for host in filter(None, found.get("--host", "").split(",")):
        refuse_foreign(words, "--host", host.partition(":")[0])
    count = found.get("-np", found.get("-npernode"))
    if count is None:
        raise words.error("mpirun is not told how many ranks to start.", f"Say it: `mpirun -np N`. {_INSTEAD}")
    return _ranks(words, "mpirun", count, variables, parse_inner)


def parse_srun(words: Words, parse_inner: Callable[[Words], dict[str, Any]]) -> dict[str, Any]:
    """Returns what follows `srun`, as fields of `Entrypoint`.

    Args:
        words: behind its name.
        parse_inner: reads the command that it starts.

    Raises:
        InputError: it would start ranks on other hosts.
    """
    found = read_options(words, "srun", SRUN)
    slurm = words.environment
    if "SLURM_JOB_ID" not in slurm:
        raise words.error(
            "srun would have Slurm start the ranks on other machines than this one.",
            f"Type it within an allocation: `salloc OPTIONS zerotune tune -- srun ...`. {_INSTEAD}",
        )
    nodes = slurm.get("SLURM_JOB_NUM_NODES", slurm.get("SLURM_NNODES", "1"))
    if "--nodes" not in found and nodes != "1":
        raise words.error(f"the allocation has {nodes} nodes, and a search runs on one.", f"Add -N 1. {_INSTEAD}")
    count = found.get("--ntasks", found.get("--ntasks-per-node", slurm.get("SLURM_NTASKS", "1")))
    exported = found.get("--export", "").split(",")
    variables = {name: value for name, equals, value in (item.partition("=") for item in exported) if equals}
    return _ranks(words, "srun", count, variables, parse_inner)


def _ranks(
    words: Words, launcher: str, count: str, variables: dict[str, str], parse_inner: Callable[[Words], dict[str, Any]]
) -> dict[str, Any]:
    if not (count.isdecimal() and int(count) > 0):
        raise words.error(f"{launcher} is told to start {count} ranks.", "Write a number above 0.")
    words.environment |= variables
    inner = parse_inner(words)
    launched = {"launcher_environment": {**inner.get("launcher_environment", {}), **variables}}
    if inner.get("launched_by") is None:
        words.notes.append(f"{launcher} is left out: ZeroTune starts the ranks itself, without MPI.")
        return {**inner, **launched, "launched_by": launcher, "slots": int(count)}
    if int(count) > 1:
        raise words.error(
            f"{launcher} starts {inner['launched_by']} {count} times.", f"Leave one of the two out. {_INSTEAD}"
        )
    words.notes.append(f"{launcher} is left out: it starts {inner['launched_by']} once.")
    return {**inner, **launched}
