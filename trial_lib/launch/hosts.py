"""The hosts that one trial spans."""

import contextlib
import ipaddress
import json
import math
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.processes import supervisor
from zerotune.trial_lib.launch.processes.supervisor import RANK_FAILED, RANKS_ENDED
from zerotune.trial_lib.launch.rank_starter import HOST, Launched, LaunchRequest, ProcessesEnd
from zerotune.trial_lib.launch.starters import ColdStarter
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.records.folders import TrialPaths


def is_this_host(name: str) -> bool:
    own = socket.gethostname()
    if name == "localhost" or name.partition(".")[0] == own.partition(".")[0]:
        return True
    with contextlib.suppress(OSError, ValueError):
        address = ipaddress.ip_address(socket.gethostbyname(name))
        listed = psutil.net_if_addrs().values()
        return address.is_loopback or str(address) in {each.address for interface in listed for each in interface}
    return False


def spanned(host: Host, hosts: Mapping[str, int], where: str) -> Host:
    """Returns the slots of all hosts that a trial spans, as if one host had them.

    ZeroTune assumes that the other hosts have the devices of this one, as DeepSpeed does.
    Raises InputError: the first host is another one, or this host has fewer slots than the hosts' list gives it.
    """
    first = next(iter(hosts))
    if not is_this_host(first):
        raise InputError(
            f"the first host is {first}, and a search runs on that one; this is {socket.gethostname()}.",
            where=where,
            remedy=f"Run zerotune on {first}, or name this host first.",
        )
    own = sum(slots for name, slots in hosts.items() if is_this_host(name))
    if own > len(host.slots):
        raise InputError(
            f"{own} slots are asked of this host, which has {len(host.slots)} {host.device} slot(s).",
            where=where,
            remedy=f"Name at most {len(host.slots)}.",
        )
    here = iter(host.slots)
    slots = [
        next(here) if is_this_host(name) else f"{name}/{number}"
        for name, count in hosts.items()
        for number in range(count)
    ]
    return replace(host, slots=slots)


# Starts trials that span the hosts of a hostfile, with DeepSpeed's launcher on each host.

# DeepSpeed's launcher sets these for each rank.
_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"),
    *("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
)

# With these ssh notices within a quarter of a minute that a host is gone.
_SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)


@dataclass(frozen=True)
class HostPart:
    host: str  # the host's name
    ranks: range  # the ranks there


def ranks_of(request: LaunchRequest, parts: Sequence[HostPart]) -> list[dict[str, Any]]:
    """Returns the log, the cores and, on this host, the CUDA_VISIBLE_DEVICES of each rank.

    DeepSpeed's launcher would use the first devices of this host, but the trial has locked its slots.
    """
    described: list[dict[str, Any]] = []
    for part in parts:
        here = is_this_host(part.host)
        for rank in (request.ranks[number] for number in part.ranks):
            visible = rank.environment.get("CUDA_VISIBLE_DEVICES") if here else None
            # The request has the slots of all ranks.
            own = None if visible is None else visible.split(",")[part.ranks.start : part.ranks.stop]
            described.append({"log": rank.log, "cores": rank.cores, "devices": None if own is None else ",".join(own)})
    return described


class HostfileStarter(ColdStarter):
    """Starts `deepspeed --no_ssh --node_rank N` on each host. A trial takes all hosts, and the first is this one."""

    def __init__(
        self,
        hosts: Mapping[str, int],
        interpreter: str,
        builders: list[str],
        environment: dict[str, str],
        note: Callable[[str], None],
        ahead: Sequence[str] = (),
    ) -> None:
        building = supervisor.command(interpreter, supervisor.BUILD)
        others = {host: _by_ssh(host, building) for host in hosts if not is_this_host(host)}
        super().__init__(interpreter, builders, environment, note, ahead, others)
        self._hosts = dict(hosts)
        first = 0
        self._parts: list[HostPart] = []
        for host, slots in hosts.items():
            self._parts.append(HostPart(host, range(first, first + slots)))
            first += slots

    def launch(self, request: LaunchRequest) -> Launched:
        self._prepare(request)
        paths = TrialPaths(Path(request.ranks[0].log).parent)
        write_whole(paths.hostfile, "".join(f"{host} slots={slots}\n" for host, slots in self._hosts.items()))
        launch = {name: getattr(request, name) for name in ("entry", "payload", "cwd")}
        write_whole(paths.launch, json.dumps({**launch, "ranks": ranks_of(request, self._parts)}))
        parts = [self._part(number, part, request, paths) for number, part in enumerate(self._parts)]
        message = {
            "ranks": parts,
            "deadline_s": request.deadline_s,
            "grace_s": request.grace_s,
            # The guard needs only this. The launch file has everything for the ranks.
            "payload": {"scratch": request.payload.get("scratch")},
        }
        return _OverHosts(self._start_guard(supervisor.HOSTS_OF_TRIAL, message, request), self._parts)

    def _part(self, number: int, part: HostPart, request: LaunchRequest, paths: TrialPaths) -> dict[str, Any]:
        first = request.ranks[part.ranks[0]]
        address = self._parts[0].host
        order = {
            "interpreter": request.interpreter,
            "environment": {name: value for name, value in first.environment.items() if name not in _OF_A_RANK},
            "cwd": request.cwd,
            "log": first.log,
            # A full experiment's log is its user's.
            "bounded_logs": [] if math.isinf(request.deadline_s) else [request.ranks[rank].log for rank in part.ranks],
            "hostfile": str(paths.hostfile),
            "launch": str(paths.launch),
            "node_rank": number,
            "master_addr": address,
            "master_port": first.environment["MASTER_PORT"],
            "scratch": request.payload.get("scratch"),
        }
        here = is_this_host(part.host)
        command = supervisor.command(sys.executable if here else request.interpreter, supervisor.HOST_PART)
        if not here:
            command = _by_ssh(part.host, command)
        # The trial's guard removes what these name when all ranks have ended.
        left = {"MASTER_ADDR": address, "MASTER_PORT": order["master_port"], "TMPDIR": first.environment.get("TMPDIR")}
        return {"command": command, "here": here, "log": first.log, "order": order, "environment": left}


def _by_ssh(host: str, command: Sequence[str]) -> list[str]:
    return ["ssh", *_SSH_OPTIONS, "--", host, shlex.join(command)]


class _OverHosts(Launched):
    """The parts of a trial on its hosts. Their end has a status for each rank."""

    def __init__(self, guard: Any, parts: list[HostPart]) -> None:
        super().__init__(guard, len(parts))
        self._parts = parts

    def wait(self) -> ProcessesEnd:
        """Waits until every host's part has ended, and no process of the trial is left on this host.

        If the trial is cut short, processes on other hosts end when their connection closes.
        """
        ending = super().wait()
        by_part = list(zip(self._parts, ending.statuses, strict=True))
        by_rank = [status for part, status in by_part for _ in part.ranks]
        lost = [part for part, status in by_part if status not in (RANKS_ENDED, RANK_FAILED, None)]
        if ending.ended_by == "ranks" and lost:
            return ProcessesEnd(HOST, by_rank, host=lost[0].host, host_rank=lost[0].ranks[0])
        return replace(ending, statuses=by_rank)
