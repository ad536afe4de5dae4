"""The readers of `deepspeed` and `torchrun`."""

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_lib.inputs.entrypoint import TRIAL_CLASS_MODULE, parse_command, read_own, take_script
from trial_lib.inputs.launchers import TORCH_LAUNCH, UserLauncher, followed
from trial_lib.inputs.words import Words, options_from_environment, read_options
from trial_lib.messages.files import read_bounded

# torch/distributed/launch.py has one more option. Without it each rank is told its local rank.
_USE_ENV = "--use_env"
_OLDER = {_USE_ENV: followed(has_value=False)}
_ONE_EACH = {"auto": "all", "gpu": "gpu", "cpu": "cpu"}


def read_deepspeed(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
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
