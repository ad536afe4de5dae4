"""Trials that span several hosts, each started by DeepSpeed's own launcher there, from one hostfile.

On every host the interpreter, the code, ZeroTune and the study's folder stand under the same paths, as DeepSpeed
expects of all but the last: a shared file system, mostly. Other hosts are reached by ssh, without a password.
"""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trial_lib.launch.cold import ColdStarter
from trial_lib.launch.hosts.hosts import is_this_host
from trial_lib.launch.processes import bootstrap
from trial_lib.launch.processes.host_part import RANK_FAILED, RANKS_ENDED
from trial_lib.launch.processes.leavings import scratch_of
from trial_lib.launch.rank_starter import HOST, Launched, LaunchRequest, ProcessesEnd
from trial_lib.records.study_folder import TrialPaths
from trial_lib.wire.whole_files import write_whole

# What DeepSpeed's launcher sets for each rank by itself.
_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"),
    *("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
)

# A host that is gone without a word is found so within a quarter of a minute.
_SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)


@dataclass(frozen=True)
class HostPart:
    """One host's part of a trial.

    Attributes:
        host: its name.
        ranks: those that run there.
    """

    host: str
    ranks: range


def ranks_of(request: LaunchRequest, parts: Sequence[HostPart]) -> list[dict[str, Any]]:
    """Returns what each rank reads of itself: its log, its cores, and CUDA_VISIBLE_DEVICES where its host is this one.

    DeepSpeed's launcher gives out the first devices of a host, and locked here are those that zerotune may use.
    """
    told: list[dict[str, Any]] = []
    for part in parts:
        here = is_this_host(part.host)
        for rank in (request.ranks[number] for number in part.ranks):
            visible = rank.environment.get("CUDA_VISIBLE_DEVICES") if here else None
            # There it names the slots of all ranks.
            own = None if visible is None else visible.split(",")[part.ranks.start : part.ranks.stop]
            told.append({"log": rank.log, "cores": rank.cores, "devices": None if own is None else ",".join(own)})
    return told


class HostfileStarter(ColdStarter):
    """Starts `deepspeed --no_ssh --node_rank N` on each host; a trial has all of them.

    Args:
        hosts: the slots of each host by its name, in the order of their ranks; the first is this one.
        interpreter: the Python of the ranks.
        builders: DeepSpeed ops to build on every host ahead of the first trial.
        environment: of the builds.
        note: told what takes its time.
        ahead: ops to build there beside the profile trial, and ahead of every other.
    """

    def __init__(
        self,
        hosts: Mapping[str, int],
        interpreter: str,
        builders: list[str],
        environment: dict[str, str],
        note: Callable[[str], None],
        ahead: Sequence[str] = (),
    ) -> None:
        building = bootstrap.command(interpreter, "trial_lib.launch.processes.build_guard")
        others = {host: _by_ssh(host, building) for host in hosts if not is_this_host(host)}
        super().__init__(interpreter, builders, environment, note, ahead, others)
        self._hosts = dict(hosts)
        first = 0
        self._parts: list[HostPart] = []
        for host, slots in hosts.items():
            self._parts.append(HostPart(host, range(first, first + slots)))
            first += slots

    def launch(self, request: LaunchRequest) -> Launched:
        """Starts a guard, which starts each host's part."""
        self._prepare(request)
        paths = TrialPaths(Path(request.ranks[0].log).parent)
        write_whole(paths.hostfile, "".join(f"{host} slots={slots}\n" for host, slots in self._hosts.items()))
        launch = {
            "entry": request.entry,
            "payload": request.payload,
            "cwd": request.cwd,
            "ranks": ranks_of(request, self._parts),
        }
        write_whole(paths.launch, json.dumps(launch))
        parts = [self._part(number, part, request, paths) for number, part in enumerate(self._parts)]
        message = {
            "ranks": parts,
            "deadline_s": request.deadline_s,
            "grace_s": request.grace_s,
            # What the guard itself looks into; the ranks have all of it.
            "payload": {"scratch": _scratch(request)},
        }
        return _OverHosts(self._start_guard("trial_lib.launch.hosts.trial_guard", message, request), self._parts)

    def _part(self, number: int, part: HostPart, request: LaunchRequest, paths: TrialPaths) -> dict[str, Any]:
        first = request.ranks[part.ranks[0]]
        address = self._parts[0].host
        told = {
            "interpreter": request.interpreter,
            "environment": {name: value for name, value in first.environment.items() if name not in _OF_A_RANK},
            "cwd": request.cwd,
            "log": first.log,
            "hostfile": str(paths.hostfile),
            "launch": str(paths.launch),
            "node_rank": number,
            "master_addr": address,
            "master_port": first.environment["MASTER_PORT"],
            "scratch": _scratch(request),
        }
        here = is_this_host(part.host)
        command = bootstrap.command(
            sys.executable if here else request.interpreter, "trial_lib.launch.processes.host_part"
        )
        if not here:
            command = _by_ssh(part.host, command)
        # What the trial's guard removes when all have ended.
        left = {"MASTER_ADDR": address, "MASTER_PORT": told["master_port"], "TMPDIR": first.environment.get("TMPDIR")}
        return {"command": command, "here": here, "log": first.log, "told": told, "environment": left}


def _scratch(request: LaunchRequest) -> str | None:
    scratch = scratch_of(request.payload)
    return None if scratch is None else str(scratch)


def _by_ssh(host: str, command: Sequence[str]) -> list[str]:
    return ["ssh", *_SSH_OPTIONS, "--", host, shlex.join(command)]


class _OverHosts(Launched):
    """The parts that run; their end is told by rank."""

    def __init__(self, guard: Any, parts: list[HostPart]) -> None:
        super().__init__(guard, len(parts))
        self._parts = parts

    def wait(self) -> ProcessesEnd:
        """Waits until every host's part has ended, and no process of the trial is left on this host.

        Where the trial is cut short, those on the others end by themselves, when they find their connection closed.
        """
        ending = super().wait()
        by_part = list(zip(self._parts, ending.statuses, strict=True))
        by_rank = [status for part, status in by_part for _ in part.ranks]
        lost = [part for part, status in by_part if status not in (RANKS_ENDED, RANK_FAILED, None)]
        if ending.ended_by == "ranks" and lost:
            return ProcessesEnd(HOST, by_rank, host=lost[0].host, host_rank=lost[0].ranks[0])
        return replace(ending, statuses=by_rank)
