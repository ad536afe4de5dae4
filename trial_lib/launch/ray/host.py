"""A study's share of one host of a Ray cluster: an actor that keeps a warm starter there as long as the study lasts.

When the driver dies Ray ends the actor, and with it goes all that it has started.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trial_lib.device.host.base import Host
from trial_lib.device.host.this_host import this_host
from trial_lib.launch.cold import ColdStarter
from trial_lib.launch.place import ThisHost
from trial_lib.launch.program import HostRanks, rank_requests
from trial_lib.launch.rank_starter import LaunchRequest, ProcessesEnd, RankStarter
from trial_lib.launch.ray.host_folder import HostFolder
from trial_lib.launch.ray.order import ClusterOrder, Delivery
from trial_lib.launch.ray.transfer import FileContents, moved, packed, result_from
from trial_lib.launch.trial import ENTRY, TrialPlan, clear, order_of, run_to_end, write_candidate
from trial_lib.launch.warm import WarmStarter
from trial_lib.records.candidate import Purpose, Withdrawal
from trial_lib.records.result import TrialResult
from trial_lib.records.study_folder import TrialPaths
from trial_lib.slots.ports import reserved_port
from trial_lib.slots.slots import held_slots
from trial_lib.wire.free_host_memory import kernel_kills
from trial_lib.wire.whole_files import OWNERS_FOLDER


@dataclass(frozen=True)
class HostSetup:
    """What a study needs on each host.

    Attributes:
        study_id: whose it is.
        interpreter: the Python of the ranks.
        builders: DeepSpeed ops to build ahead of the first trial.
        ahead: ops to build beside the profile trial, and ahead of every other.
        environment: what the ranks start from.
        is_warm: whether they are forks of a primed interpreter.
        lock_dir: the locks of slots and ports, the same for all studies on a host.
    """

    study_id: str
    interpreter: str
    builders: list[str]
    ahead: list[str]
    environment: dict[str, str]
    is_warm: bool
    lock_dir: Path


@dataclass(frozen=True)
class PartEnd:
    """How one host's part of a trial ended.

    Attributes:
        ending: of its ranks.
        kernel_killed: whether the kernel's out-of-memory killer struck on the host.
        files: what its ranks have left.
        notes: what held it up, for people.
    """

    ending: ProcessesEnd
    kernel_killed: bool
    files: FileContents
    notes: list[str]


class RayHost:
    """Runs a study's trials on this host. Its methods run in threads of their own.

    Args:
        setup: what the study needs here.
    """

    def __init__(self, setup: HostSetup) -> None:
        self._setup = setup
        self._held_folder = HostFolder(setup.lock_dir, setup.study_id)
        self._folder = self._held_folder.path
        self._notes: list[str] = []
        self._cancelled: dict[str, threading.Event] = {}
        self._is_closed = False
        self._meetings: dict[str, contextlib.ExitStack] = {}
        self._starter = self._new_starter()

    def _new_starter(self) -> RankStarter:
        setup = self._setup
        if not setup.is_warm:
            return ColdStarter(setup.interpreter, setup.builders, setup.environment, self._notes.append, setup.ahead)
        log = str(self._folder / "fork_server.log")
        warm = WarmStarter(setup.interpreter, setup.builders, setup.environment, log, self._notes.append, setup.ahead)
        warm.start()
        return warm

    def prime(self, modules: list[str]) -> None:
        """Has the starter import what the profile trial had imported."""
        self._starter.prime(modules)

    def run(self, order: ClusterOrder, devices: list[str]) -> Delivery:
        """Runs an order for one host to its end.

        Args:
            order: what to do.
            devices: the GPUs that Ray has given it; none on a CPU, where the host's own allocator chooses the cores.
        """
        plans = [moved(plan, self._folder / plan.paths.root.name) for plan in order.plans]
        place = ThisHost(self._starter, self._host(devices), self._setup.lock_dir)
        with self._cancellable(order.name) as cancelled:
            ends: list[TrialResult | Withdrawal]
            if order.sweep is None:
                ends = [place.run_trial(plans[0], cancelled, self._notes.append)]
            else:
                ends = place.run_sweep(plans, order.sweep, cancelled, self._notes.append, lambda position, result: None)
        told = [
            result_from(end, there.paths.root, here.paths.root) if isinstance(end, TrialResult) else end
            for end, there, here in zip(ends, plans, order.plans, strict=True)
        ]
        return Delivery(ends=told, files=[self._taken(plan.paths) for plan in plans], notes=self._taken_notes())

    def meet(self, name: str) -> int:
        """Reserves a port for the rendezvous of a trial over several hosts, until its part here has ended."""
        self._meetings[name] = contextlib.ExitStack()
        return self._meetings[name].enter_context(reserved_port(self._setup.lock_dir))

    def run_part(self, plan: TrialPlan, part: HostRanks, devices: list[str]) -> PartEnd:
        """Runs this host's ranks of a trial over several hosts to their end.

        Args:
            plan: the trial.
            part: which of its ranks.
            devices: the GPUs that Ray has given it.
        """
        # Two nodes of a cluster may be one machine's.
        there = moved(plan, self._folder / f"{plan.paths.root.name}-{part.first_rank}")
        host, lock_dir = self._host(devices), self._setup.lock_dir
        kills_before = kernel_kills()
        write_candidate(there)
        clear(there)
        with (
            self._cancellable(plan.trial_id) as cancelled,
            held_slots(lock_dir, host, part.slots, cancelled.is_set, self._notes.append) as slots,
            self._meetings.pop(plan.trial_id, contextlib.ExitStack()),
        ):
            ending = ProcessesEnd("cancel", [None] * part.slots)
            if slots is not None:
                there.paths.scratch.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
                request = _part_request(there, part, host, slots.names)
                ending = run_to_end(replace(request, descriptors=slots.descriptors), self._starter, cancelled)
        return PartEnd(ending, kernel_kills() > kills_before, self._taken(there.paths), self._taken_notes())

    def cancel(self, name: str | None = None) -> None:
        """Ends one order's ranks here, or all that run."""
        for running, cancelled in list(self._cancelled.items()):
            if name in (None, running):
                cancelled.set()

    def close(self) -> None:
        """Ends everything here."""
        self._is_closed = True
        self.cancel()
        self._starter.close()
        self._held_folder.remove()

    def _host(self, devices: list[str]) -> Host:
        host = this_host()
        return replace(host, slots=devices) if devices else host

    @contextlib.contextmanager
    def _cancellable(self, name: str) -> Iterator[threading.Event]:
        self._cancelled[name] = threading.Event()
        if self._is_closed:
            self._cancelled[name].set()
        try:
            yield self._cancelled[name]
        finally:
            del self._cancelled[name]

    def _taken(self, paths: TrialPaths) -> FileContents:
        shutil.rmtree(paths.scratch, ignore_errors=True)
        files = packed(paths)
        shutil.rmtree(paths.root, ignore_errors=True)
        return files

    def _taken_notes(self) -> list[str]:
        notes, self._notes[:] = list(self._notes), []
        return notes


def _part_request(plan: TrialPlan, part: HostRanks, host: Host, slots: list[str]) -> LaunchRequest:
    logs = [plan.paths.log(part.first_rank + rank) for rank in range(part.slots)]
    ranks = rank_requests(plan.program, host, slots, part.port, logs, part)
    model_dir = str(plan.program.model_dir)
    return LaunchRequest(
        plan.program.interpreter,
        ENTRY,
        order_of(plan, launched_at=time.time()).to_json(),
        model_dir,
        ranks,
        plan.deadline_s,
        first_rank=part.first_rank,
        beside_builds=plan.purpose is Purpose.PROFILE,
    )
