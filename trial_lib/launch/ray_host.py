"""One host of a Ray cluster: the study's actor there, and the messages to it and back.

The actor keeps a warm starter until the study ends. If the driver dies, Ray ends the actor, and with it all processes
that it has started. The messages are plain data, and no file has them.
"""

import contextlib
import fcntl
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from zerotune.trial_lib.device.base import Host, has_killed, kernel_kills
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.locks import hold_folder, lock_file, own_folder, release, reserved_port
from zerotune.trial_lib.launch.rank_starter import HostRanks, ProcessesEnd, RankStarter
from zerotune.trial_lib.launch.slots import SlotWait, held_slots
from zerotune.trial_lib.launch.starters import ColdStarter, WarmStarter
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan, begin, order_of, request_of, run_to_end
from zerotune.trial_lib.messages.files import OWNERS_FOLDER
from zerotune.trial_lib.messages.measurement import Import
from zerotune.trial_lib.messages.orders import TrainingSpec
from zerotune.trial_lib.records.candidate import Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import TrialResult

# The messages.

NAMESPACE = "zerotune"


@dataclass(frozen=True)
class ClusterShare:
    resource: str  # Ray's name of a slot: `GPU` or `CPU`
    slots: int  # the number of slots on each host
    hosts: int  # the number of hosts


@dataclass(frozen=True)
class ClusterOrder:
    study_id: str  # the study's id
    plans: tuple[TrialPlan, ...]  # the plans of its trials
    share: ClusterShare  # the part of the cluster that it takes
    sweep: Sweep | None = None  # the search's order. None for a single trial.

    @property
    def name(self) -> str:
        """The order's name, unique among all studies."""
        return self.plans[0].trial_id


FileContents = dict[str, bytes]
"""The contents of files, by their paths in the trial's folder."""


@dataclass(frozen=True)
class Delivery:
    """The answer to an order, or to the part of an order that one of several hosts has."""

    # For an order on one host: the result of each plan, with the driver's paths, or the reason for none
    ends: list[TrialResult | Withdrawal] = field(default_factory=list)
    ending: ProcessesEnd | None = None  # for an order on several hosts: the end of its ranks
    # For an order on several hosts: whether the kernel's out-of-memory killer struck
    kernel_killed: bool | None = False
    files: list[FileContents] = field(default_factory=list)  # the files that the ranks of each plan have left
    notes: list[str] = field(default_factory=list)  # sentences for the user on anything that delayed the order


@dataclass(frozen=True)
class HostSetup:
    study_id: str  # the study's id
    interpreter: str  # the Python of the ranks
    builders: list[str]  # DeepSpeed ops to build before the first trial
    ahead: list[str]  # ops to build during the profile trial, before all other trials
    environment: dict[str, str]  # the environment variables that ranks start from
    is_warm: bool  # whether ranks are forks of a primed interpreter
    lock_dir: Path  # the folder with the locks of slots and ports, the same for all studies on a host


# Transfers a trial to another host and back: its plan there, its small files here.

# Only the end of a longer file is transferred. It is mostly a log.
_LARGEST_FILE = 8 * 2**20

_ValueT = TypeVar("_ValueT")


def moved(plan: TrialPlan, root: Path) -> TrialPlan:
    """Returns a plan with its files in another folder. Its program's arguments and variables change too."""
    old, new = str(plan.paths.root), str(root)
    program = replace(
        plan.program,
        arguments=_renamed(plan.program.arguments, old, new),
        environment=_renamed(plan.program.environment, old, new),
        files={path.replace(old, new): text for path, text in plan.program.files.items()},
    )
    spec = plan.training_spec
    return replace(
        plan,
        paths=TrialPaths(root),
        program=program,
        training_spec=None if spec is None else TrainingSpec(**_renamed(asdict(spec), old, new)),
    )


def result_from(result: TrialResult, there: Path, here: Path) -> TrialResult:
    renamed = _renamed(result.to_json(), str(there), str(here))
    return TrialResult.from_text(json.dumps(renamed))


def _renamed(value: _ValueT, old: str, new: str) -> _ValueT:
    if isinstance(value, str):
        return value.replace(old, new)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: _renamed(inner, old, new) for key, inner in value.items()}  # type: ignore[return-value]
    if isinstance(value, list):
        return [_renamed(inner, old, new) for inner in value]  # type: ignore[return-value]
    return value


def packed(paths: TrialPaths) -> FileContents:
    """Returns the files that the ranks of a trial have left in its folder."""
    of_the_driver = (paths.candidate, paths.ds_config, paths.training_spec, paths.result)
    files: FileContents = {}
    for path in sorted(paths.root.rglob("*")):
        if path.is_file() and not path.is_symlink() and path not in of_the_driver:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LARGEST_FILE))
                files[str(path.relative_to(paths.root))] = file.read()
    return files


def unpack(files: FileContents, root: Path) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


# The folder of a study on a host of a Ray cluster. It exists while the study has an actor there.


class HostFolder:
    """Makes a study's folder, and removes the folders of studies whose actors here were killed.

    Two nodes of a cluster may be on one machine. Their actors share the folder.
    """

    def __init__(self, lock_dir: Path, study_id: str) -> None:
        own = own_folder(lock_dir)
        self.path = own / "trials" / study_id
        self._locks = [hold_folder(lock_dir)]
        self.path.parent.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
        # One actor at a time does this, because a new lock file is not locked at once.
        starting = lock_file(own / "trials.lock", fcntl.LOCK_EX)
        try:
            for other in self.path.parent.iterdir():
                if other.is_dir() and other != self.path:
                    _remove_if_free(other)
            self.path.mkdir(exist_ok=True)
            self._locks.append(lock_file(_lock_of(self.path), fcntl.LOCK_SH))
        finally:
            release([starting])

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_of(self.path).unlink(missing_ok=True)
        release(self._locks)


def _remove_if_free(folder: Path) -> None:
    try:
        lock = lock_file(_lock_of(folder), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
    release([lock])


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


# The actor.


def actor_name(study_id: str, node_id: str) -> str:
    return f"zerotune-{study_id}-{node_id}"


class RayHost:
    """Runs a study's trials on this host. Each call of a method has a thread of its own."""

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

    def prime(self, imported: Sequence[Import]) -> None:
        self._starter.prime(imported)

    def run(self, order: ClusterOrder, devices: list[str]) -> Delivery:
        """Runs an order for one host, on Ray's GPUs. On a CPU there are none, and this host chooses the cores."""
        plans = [moved(plan, self._folder / plan.paths.root.name) for plan in order.plans]
        place = ThisHost(self._starter, self._host(devices), self._setup.lock_dir)
        with self._cancellable(order.name) as cancelled:
            ends: list[TrialResult | Withdrawal]
            if order.sweep is None:
                ends = [place.run_trial(plans[0], cancelled, self._notes.append)]
            else:
                ends = place.run_sweep(plans, order.sweep, cancelled, self._notes.append, lambda position, result: None)
        ended = [
            result_from(end, there.paths.root, here.paths.root) if isinstance(end, TrialResult) else end
            for end, there, here in zip(ends, plans, order.plans, strict=True)
        ]
        return Delivery(ends=ended, files=[self._taken(plan.paths) for plan in plans], notes=self._taken_notes())

    def meet(self, name: str) -> int:
        """Reserves a port for the rendezvous of a trial over several hosts until its part here ends."""
        self._meetings[name] = contextlib.ExitStack()
        return self._meetings[name].enter_context(reserved_port())

    def run_part(self, plan: TrialPlan, part: HostRanks, devices: list[str]) -> Delivery:
        """Runs this host's ranks of a trial over several hosts to their end."""
        with contextlib.ExitStack() as held:
            # Whatever fails, the port is given back.
            held.enter_context(self._meetings.pop(plan.trial_id, contextlib.ExitStack()))
            # Two nodes of a cluster may be on one machine.
            there = moved(plan, self._folder / f"{plan.paths.root.name}-{part.first_rank}")
            host, lock_dir = self._host(devices), self._setup.lock_dir
            kills_before = kernel_kills()
            begin(there)
            slot_wait = SlotWait(f"trial {plan.number:04d}", self._notes.append)
            cancelled = held.enter_context(self._cancellable(plan.trial_id))
            self._starter.prepare(plan.purpose is Purpose.PROFILE, plan.program.starts_cold)
            slots = held.enter_context(
                held_slots(lock_dir, host, part.slots, cancelled.is_set, slot_wait.tell, what=plan.trial_id)
            )
            slot_wait.end(slots is not None)
            ending = ProcessesEnd("cancel", [None] * part.slots)
            if slots is not None:
                there.paths.scratch.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
                request = request_of(there, order_of(there), host, slots, part.port, plan.deadline_s, part)
                ending = run_to_end(request, self._starter, cancelled)
        return Delivery([], ending, has_killed(kills_before), [self._taken(there.paths)], self._taken_notes())

    def cancel(self, name: str | None = None) -> None:
        """Ends the ranks of one order here, or of all orders."""
        for running, cancelled in list(self._cancelled.items()):
            if name in (None, running):
                cancelled.set()

    def close(self) -> None:
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
