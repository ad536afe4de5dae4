"""The options of the launchers: what each means for ZeroTune, which starts the ranks in their place.

Every option that they know stands here. One that a table lacks is mistyped or new: it is refused, never ignored.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from trial_lib.command.words import Words


class _Does(Enum):
    FOLLOWED = "what it says is done"
    LEFT_OUT = "ZeroTune decides it itself: a note says so"
    ONE_NODE = "a number of nodes, or of this one: anything else is refused"
    REFUSED = "ZeroTune cannot do it"


@dataclass(frozen=True)
class Option:
    """An option of a launcher.

    Attributes:
        does: what becomes of it.
        why: it is left out, or refused.
        has_value: whether a value follows.
        name: under which it is returned, where it has several.
    """

    does: _Does
    why: str = ""
    has_value: bool = True
    name: str = ""


def _followed(name: str = "", has_value: bool = True) -> Option:
    return Option(_Does.FOLLOWED, has_value=has_value, name=name)


def _left_out(why: str, has_value: bool = True) -> Option:
    return Option(_Does.LEFT_OUT, why, has_value)


def _refused(why: str, has_value: bool = True) -> Option:
    return Option(_Does.REFUSED, why, has_value)


SLOTS = "resources.slots_per_trial says how many ranks start"
_PORT = "every trial has a port of its own"
_ONE_NODE = "a trial runs on one node"
_LOGS = "every rank has a log of its own"
_CORES = "ZeroTune hands out the cores"
_NEVER_AGAIN = "a trial is never started again"
_PROCESSES = "ZeroTune watches over the ranks"
_NO_PYTHON = "ZeroTune starts Python programs only"

DEEPSPEED: dict[str, Option] = {
    "--hostfile": _followed(),
    "-H": _followed("--hostfile"),
    "--include": _followed(),
    "-i": _followed("--include"),
    "--exclude": _followed(),
    "-e": _followed("--exclude"),
    "--num_gpus": _followed(),
    "--num_accelerators": _followed("--num_gpus"),
    "--module": _followed(has_value=False),
    "--no_local_rank": _followed(has_value=False),
    "--num_nodes": _followed(),
    "--node_rank": Option(_Does.ONE_NODE),
    "--master_port": _left_out(_PORT),
    "--master_addr": _left_out(_PORT),
    "--launcher": _left_out(_ONE_NODE),
    "--launcher_args": _left_out(_ONE_NODE),
    "--ssh_port": _left_out(_ONE_NODE),
    "--no_ssh": _left_out(_ONE_NODE, has_value=False),
    "--no_ssh_check": _left_out(_ONE_NODE, has_value=False),
    "--enable_each_rank_log": _left_out(_LOGS),
    "--log_level": _left_out(_LOGS),
    "--quiet": _left_out(_LOGS, has_value=False),
    "-q": _left_out(_LOGS, has_value=False),
    "--save_pid": _left_out(_PROCESSES, has_value=False),
    "--bind_cores_to_rank": _left_out(_CORES, has_value=False),
    "--bind_core_list": _left_out(_CORES),
    "--force_multi": _refused("it asks for the launcher of several nodes", has_value=False),
    "--no_python": _refused(_NO_PYTHON, has_value=False),
    "--autotuning": _refused("ZeroTune takes the place of DeepSpeed's autotuner"),
    "--venv_script": _refused("no shell is started: activate the environment before zerotune"),
}
"""Of `deepspeed/launcher/runner.py`, DeepSpeed 0.19."""

# Where a YAML says how many ranks start, and on which devices a study runs is for the command to say.
DEEPSPEED_IN_YAML: dict[str, Option] = {
    **{flag: option for flag, option in DEEPSPEED.items() if option.does is not _Does.FOLLOWED},
    "--num_gpus": _left_out(SLOTS),
    "--num_accelerators": _left_out(SLOTS),
    "--num_nodes": Option(_Does.ONE_NODE),
    "--module": DEEPSPEED["--module"],
    "--no_local_rank": DEEPSPEED["--no_local_rank"],
}

TORCHRUN: dict[str, Option] = {
    "--nproc_per_node": _followed(),
    "--module": _followed(has_value=False),
    "-m": _followed("--module", has_value=False),
    "--nnodes": Option(_Does.ONE_NODE),
    "--node_rank": Option(_Does.ONE_NODE),
    "--standalone": _left_out(_ONE_NODE, has_value=False),
    "--master_port": _left_out(_PORT),
    "--master_addr": _left_out(_PORT),
    "--local_addr": _left_out(_PORT),
    "--rdzv_backend": _left_out(_PORT),
    "--rdzv_endpoint": _left_out(_PORT),
    "--rdzv_id": _left_out(_PORT),
    "--rdzv_conf": _left_out(_PORT),
    "--max_restarts": _left_out(_NEVER_AGAIN),
    "--monitor_interval": _left_out(_PROCESSES),
    "--start_method": _left_out(_PROCESSES),
    "--signals_to_handle": _left_out(_PROCESSES),
    "--shutdown_timeout": _left_out(_PROCESSES),
    "--event_log_handler": _left_out(_LOGS),
    "--role": _left_out(_LOGS),
    "--log_dir": _left_out(_LOGS),
    "--redirects": _left_out(_LOGS),
    "-r": _left_out(_LOGS),
    "--tee": _left_out(_LOGS),
    "-t": _left_out(_LOGS),
    "--local_ranks_filter": _left_out(_LOGS),
    "--duplicate_stdout_filters": _left_out(_LOGS),
    "--duplicate_stderr_filters": _left_out(_LOGS),
    "--logs_specs": _left_out(_LOGS),
    "--numa_binding": _left_out(_CORES),
    "--no_python": _refused(_NO_PYTHON, has_value=False),
    "--run_path": _refused("ZeroTune starts a script or a module", has_value=False),
    "--virtual_local_rank": _refused("a rank finds its device by its LOCAL_RANK", has_value=False),
}
"""Of `torch/distributed/run.py`, torch 2.13."""
TORCHRUN_IN_YAML = {**TORCHRUN, "--nproc_per_node": _left_out(SLOTS)}

DETERMINED: dict[str, Option] = {
    **DEEPSPEED_IN_YAML,
    **TORCHRUN_IN_YAML,
    "--trial": _followed(),
    "--": _followed(has_value=False),
}

_MPI = "the ranks are started without MPI"
_DEVICES = "ZeroTune hands out the devices"
_JOB = "the search runs in the allocation that there is"
_OTHER_FOLDER = "change to that folder before zerotune"

MPIRUN: dict[str, Option] = {
    **{name: _followed("-np") for name in ("-np", "--np", "-n", "--n", "-c")},
    **{name: _followed("-npernode") for name in ("-npernode", "--npernode", "-ppn", "--ppn", "-perhost")},
    **{
        name: _refused("a search runs on this host")
        for name in ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "-f", "-hosts", "--hosts")
    },
    **{name: _followed("--host") for name in ("--host", "-host", "-H")},
    **{name: _refused(_OTHER_FOLDER) for name in ("-wdir", "--wdir", "-wd", "--wd")},
    **{
        name: _left_out(_CORES)
        for name in ("--bind-to", "-bind-to", "--map-by", "-map-by", "--rank-by", "-rank-by", "--cpu-set")
    },
    **{
        name: _left_out(_MPI)
        for name in ("--prefix", "--timeout", "--launcher", "-launcher", "--output-filename", "--output", "-genvlist")
    },
    **{
        name: _left_out(_MPI, has_value=False)
        for name in (
            *("--oversubscribe", "-oversubscribe", "--nooversubscribe", "--use-hwthread-cpus", "--report-bindings"),
            *("-report-bindings", "--allow-run-as-root", "-allow-run-as-root", "--tag-output", "-tag-output", "-l"),
            *("--timestamp-output", "--display-map", "--display-allocation", "--bind-to-core", "-q", "--quiet"),
            *("-v", "--verbose", "-genvall", "-genvnone"),
        )
    },
}
"""Of Open MPI 4 and 5, and of MPICH's and Intel's Hydra."""

SRUN: dict[str, Option] = {
    **{name: _followed("--ntasks") for name in ("-n", "--ntasks")},
    "--ntasks-per-node": _followed(),
    "--export": _followed(),
    **{name: Option(_Does.ONE_NODE, name="--nodes") for name in ("-N", "--nodes")},
    **{
        name: _left_out(_DEVICES)
        for name in ("-G", "--gpus", "--gres", "--gpus-per-node", "--gpus-per-task", "--gpu-bind", "--tres-per-task")
    },
    **{
        name: _left_out(_CORES)
        for name in ("-c", "--cpus-per-task", "--cpu-bind", "--cpus-per-gpu", "--hint", "--threads-per-core", "-m")
    },
    "--distribution": _left_out(_CORES),
    **{
        name: _left_out(_JOB)
        for name in (
            *("-p", "--partition", "-A", "--account", "-t", "--time", "-q", "--qos", "-J", "--job-name", "--mem"),
            *("--mem-per-cpu", "--mem-per-gpu", "-w", "--nodelist", "-x", "--exclude", "--jobid", "-C", "--constraint"),
            *("--reservation", "--network", "--signal", "--comment", "-W", "--wait", "--mpi"),
        )
    },
    **{
        name: _left_out(_JOB, has_value=False)
        for name in ("--exclusive", "--overlap", "-s", "--oversubscribe", "-K", "--kill-on-bad-exit", "--pty", "-v")
    },
    **{name: _left_out(_LOGS) for name in ("-o", "--output", "-e", "--error", "-i", "--input")},
    **{
        name: _left_out(_LOGS, has_value=False)
        for name in ("-l", "--label", "-u", "--unbuffered", "-Q", "--quiet", "--verbose")
    },
    **{name: _refused(_OTHER_FOLDER) for name in ("-D", "--chdir")},
    "--multi-prog": _refused("it starts several programs", has_value=False),
    **{
        name: _refused("start zerotune within the container")
        for name in ("--container", "--container-image", "--container-mounts", "--container-workdir")
    },
}
"""Of Slurm 24."""


def read_options(
    words: Words,
    launcher: str,
    table: Mapping[str, Option],
    *,
    is_dash_underscore: bool = False,
    last: Sequence[str] = (),
) -> dict[str, str]:
    """Takes the options of a launcher off the words, up to the script, and returns those that count.

    Args:
        words: of the command. Options that are left out are noted there.
        launcher: its name.
        table: its options.
        is_dash_underscore: whether they may be spelt with dashes or with underscores.
        last: options behind which there are no others.

    Returns:
        The value of each option that is followed, "" for one that has none.

    Raises:
        InputError: an option is unknown, has no value, asks for several nodes or is nothing that ZeroTune can do.
    """
    found: dict[str, str] = {}
    while words and words.first.startswith("-"):
        word = words.take()
        flag, option, attached = _option(words, launcher, table, word, is_dash_underscore)
        value = attached or ""
        if option.has_value and attached is None:
            value = words.take_after(flag)
        _follow(words, launcher, flag, option, value, found)
        if flag in last:
            break
    return found


def options_from_environment(words: Words) -> dict[str, str]:
    """Returns the options of torchrun that count and are set by the environment, as `PET_NPROC_PER_NODE=2` does.

    Raises:
        InputError: one asks for what ZeroTune cannot do.
    """
    found: dict[str, str] = {}
    for name, value in words.environment.items():
        flag = "--" + name.removeprefix("PET_").lower()
        option = TORCHRUN.get(flag)
        if not name.startswith("PET_") or option is None or (not option.has_value and value in ("", "0")):
            continue
        _follow(words, "torchrun", name, Option(option.does, option.why, option.has_value, flag), value, found)
    return found


def _option(
    words: Words, launcher: str, table: Mapping[str, Option], word: str, is_dash_underscore: bool
) -> tuple[str, Option, str | None]:
    """Returns an option's flag in full, the option, and the value that stands in the same word, if one does."""
    flag, equals, value = word.partition("=")
    attached = value if equals else None
    if flag not in table and not flag.startswith("--") and len(flag) > 2:
        flag, attached = word[:2], word[2:]
    if is_dash_underscore and flag.startswith("--"):
        flag = "--" + flag[2:].replace("-", "_")
    if flag in table:
        return flag, table[flag], attached
    # As argparse does, which both launchers read their options with.
    begun = [known for known in table if flag.startswith("--") and len(flag) > 2 and known.startswith(flag)]
    if len(begun) == 1:
        return begun[0], table[begun[0]], attached
    near = begun or difflib.get_close_matches(flag, table, n=1)
    raise words.error(
        f"the option {flag} of the launcher {launcher} is not supported.",
        f"Did you mean {' or '.join(near)}?"
        if near and words.follows
        else f"Leave it out, or write `python3 SCRIPT ARGUMENTS`: {SLOTS}.",
    )


def _follow(words: Words, launcher: str, flag: str, option: Option, value: str, found: dict[str, str]) -> None:
    """Does what is to become of an option: returns it in `found`, notes that it is left out, or refuses it."""
    does, why = option.does, option.why
    shown = f"{flag} {value}".rstrip()
    if does is _Does.FOLLOWED:
        found[option.name or flag] = value
    elif does is _Does.LEFT_OUT:
        words.notes.append(f"{shown} is left out: {why}.")
    elif does is _Does.REFUSED:
        raise words.error(f"the option {flag} of the launcher {launcher} is not supported: {why}.", "Leave it out.")
    elif value in _THIS_NODE["rank" if flag.lower().endswith("rank") else "count"]:
        found[option.name or flag] = value
        words.notes.append(f"{shown} is left out: {_ONE_NODE}.")
    else:
        devices = "" if words.follows else ", with resources.slots_per_trial devices"
        raise words.error(f"{shown} asks for several nodes.", f"Leave {flag} out: a search runs on one node{devices}.")


_THIS_NODE = {"count": ("1", "1:1", "1-1", "-1"), "rank": ("0", "-1")}
