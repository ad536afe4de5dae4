"""Reads which devices `deepspeed` uses: by its hostfile, `--include`, `--exclude` or a number.

They are devices of this host, or all devices of several hosts.
"""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.inputs.words import Words
from trial_lib.messages.files import read_bounded

DEFAULT_HOSTFILE = Path("/job/hostfile")
# Of variables, `deepspeed` hands these to the ranks of several hosts (deepspeed/launcher/runner.py, `export_envs` of
# deepspeed/accelerator/cuda_accelerator.py), with those in a file of the home or the working directory.
_PASSED = ("MLFLOW*", "PYTHON*", "MV2*", "UCX*", "NCCL*")
_VARIABLES_FILE = ".deepspeed_env"
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def deepspeed_slots(words: Words, options: Mapping[str, str]) -> dict[str, Any]:
    """Returns how many ranks `deepspeed` starts and on which devices, as fields of `Entrypoint`.

    Args:
        words: the command's words, with its folder and its name in errors.
        options: the launcher's options, by name.

    Raises:
        InputError: the options name another host alone or some devices of several hosts, contradict each other, or
            are misspelt.
    """
    chosen = [flag for flag in ("--include", "--exclude", "--num_gpus") if flag in options]
    if len(chosen) > 1:
        raise words.error(f"{chosen[0]} and {chosen[1]} exclude each other.", f"Leave {chosen[1]} out.")
    hosts = _first_hosts(words, _hosts_in_file(words, options.get("--hostfile")), options.get("--num_nodes"))
    if len(hosts) > 1:
        if chosen:
            raise words.error(
                f"{chosen[0]} chooses among the slots of {len(hosts)} hosts ({', '.join(hosts)}).",
                f"Leave {chosen[0]} out, and name in the hostfile what a trial is to have.",
            )
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
    count = _count(words, options.get("--num_gpus", "-1"))
    if count is not None:
        return {"slots": count}
    if "--include" in options:
        devices = _devices(words, "--include", options["--include"], host)
        # A host's name alone means all its devices.
        return {"slots": len(devices), "devices": devices} if devices else {"slots": slots or "memory_nodes"}
    if "--exclude" in options:
        excluded = _devices(words, "--exclude", options["--exclude"], host)
        if not excluded:
            raise words.error("--exclude leaves no device.", "Name the devices to leave out, as in localhost:0.")
        if slots is not None:
            left = tuple(device for device in range(slots) if device not in excluded)
            return {"slots": len(left), "devices": left}
        return {"slots": "all", "excluded_devices": excluded}
    return {"slots": slots or "memory_nodes"}


def _count(words: Words, text: str) -> int | None:
    # A number of devices. None means all.
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
        what = getattr(error, "strerror", None) or ("it is not UTF-8" if isinstance(error, UnicodeError) else error)
        raise words.error(f"the hostfile {path} cannot be read ({what}).", leave_out) from None
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


def _variables_in_file(words: Words) -> dict[str, str]:
    # The variables that `deepspeed` sets for the ranks of several hosts.
    name = words.environment.get("DS_ENV_FILE", _VARIABLES_FILE)
    found: dict[str, str] = {}
    for path in (Path("~").expanduser() / name, words.folder / name):
        try:
            lines = path.read_text().splitlines() if path.is_file() else []
        except (OSError, ValueError) as error:
            what = (
                "it is not UTF-8" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or str(error)
            )
            raise words.error(f"{path} cannot be read ({what}).", "Write one line for each variable.") from None
        for line in lines:
            variable, equals, value = line.partition("=")
            if not equals:
                raise words.error(f"{path} has the line {line!r}.", "Write NAME=VALUE.")
            found[variable.strip()] = value.strip()
    return found


def _devices(words: Words, flag: str, text: str, host: tuple[str, int] | None) -> tuple[int, ...]:
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
    """Refuses a host that is not this one.

    Args:
        words: the command's words.
        place: the option or file that names the host.
        host: the host's name.

    Raises:
        InputError: the host is another one.
    """
    own = socket.gethostname()
    if host in ("localhost", "127.0.0.1") or host.partition(".")[0] == own.partition(".")[0]:
        return
    raise words.error(
        f"{place} names the host {host}, and a search runs on this one, {own}.",
        "Run zerotune there, or name localhost.",
    )
