"""One trial, and a sweep of several: slots, a port, processes, a deadline, and results complete whatever happens."""

import contextlib
import json
import math
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from zerotune.trial_lib.deepspeed_config.overrides import TRAIN_BATCH
from zerotune.trial_lib.device.base import Host, has_killed, kernel_kills
from zerotune.trial_lib.launch.device_watch import note_devices, noting_standing_ranks, watched
from zerotune.trial_lib.launch.locks import reserved_port
from zerotune.trial_lib.launch.outcome import (
    MEASUREMENT,
    PROGRAM,
    classify,
    is_from_outside,
    read_rank_record,
    read_record,
)
from zerotune.trial_lib.launch.processes.watchdog import LEFT, REMOVED
from zerotune.trial_lib.launch.rank_starter import (
    HostRanks,
    LaunchRequest,
    ProcessesEnd,
    Program,
    RankStarter,
    StarterClosedError,
    rank_requests,
)
from zerotune.trial_lib.launch.slots import HeldSlots, SlotWait, held_slots
from zerotune.trial_lib.launch.trial_files import hidden_folders, layer_for, put_away, remove
from zerotune.trial_lib.messages import orders
from zerotune.trial_lib.messages.build_times import seconds as build_seconds
from zerotune.trial_lib.messages.files import OWNERS_FOLDER, write_all, write_whole
from zerotune.trial_lib.messages.measurement import Import, Measurement, Memory
from zerotune.trial_lib.messages.orders import (
    ProbeSettings,
    RankOrder,
    SizeOrder,
    TrainingSpec,
    seconds_since,
    since_boot,
)
from zerotune.trial_lib.messages.shared_segments import OF_NCCL
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import Outcome, TrialDevice, TrialResult, WaitedForSlots
from zerotune.trial_lib.records.units import bytes_shown

# Sentences for the user about CUDA's caching allocator in a trial.

# A note appears if idle fragments take more than this share of the device.
_LARGE = 0.1
# The name of the setting since torch 2.9, and the older name.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def allocator_note(memory: Memory, environment: Mapping[str, str]) -> str:
    """Returns a sentence on a trial's memory beyond its peak. Mostly there is nothing to say, and on a CPU never."""
    said = []
    if memory.was_short:
        said.append(
            f"CUDA's allocator had to empty its cache {max(memory.counted_retries)} times in the measured steps, which "
            "costs time: memory was short, and a longer training may run out of it."
        )
    ranks = zip(memory.peak_reserved, memory.steps_peak, memory.least_free, strict=False)
    idle, share = max(
        ((reserved - peak, (reserved - peak) / (reserved + free)) for reserved, peak, free in ranks if reserved),
        default=(0, 0.0),
    )
    if share >= _LARGE and not any(_EXPANDABLE in environment.get(name, "") for name in _SETTINGS):
        said.append(
            f"{bytes_shown(idle)} of the device ({share:.0%}) were reserved and held no tensor at the peak: "
            f"PYTORCH_CUDA_ALLOC_CONF={_EXPANDABLE} may make them usable."
        )
    return " ".join(said)


ENTRY = "zerotune.trial_lib.rank.rank:run"
"""The function that each rank of a trial calls."""

_MOST_NAMES = 3
# Prefixes of segments in use at the end of a program: of a loader's workers (multiprocessing, torch), and of NCCL's
# ranks.
_OF_THE_ENDED = ("sem.mp-", "torch_", OF_NCCL)


@dataclass(frozen=True)
class TrialPlan(ProbeSettings):
    """Everything that decides a trial. `ProbeSettings` has the fields that say how it is measured."""

    trial_id: str  # unique over all studies
    number: int  # in its study
    purpose: Purpose  # why it runs
    candidate: Candidate  # the configuration that it runs with
    ds_config: dict[str, Any]  # the complete DeepSpeed configuration
    config_hash: str  # the hash of `ds_config`
    program: Program  # the user's program
    deadline_s: float  # seconds that it may take
    paths: TrialPaths  # its files
    # The spec for the ranks of a trial class, or of a script that uses the Core API; None for others
    training_spec: TrainingSpec | None = None
    # As `RankOrder` has it. The study sets its own start here; None is the start of the trial.
    protected_before: float | None = None
    patience_s: float = 30.0  # as `RankOrder` has it
    device: str | None = None  # as `RankOrder` has it
    # Devices to take if they are free: those of the trials that this one is compared with
    preferred: tuple[str, ...] = ()
    name: str = ""  # the name of the candidate in its study
    with_own: bool = False  # whether a profile trial measures the user's configuration as well
    # Outcome and reason if no command starts the program with the candidate, and whether that says nothing about it. It
    # is then not run.
    refused: tuple[Outcome, str, bool] | None = None

    @property
    def label(self) -> str:
        """The name of the trial, such as `z2-mbs16` or `confirm-z2-mbs16`."""
        return self.purpose.label(self.name or self.candidate.label)


# The places where trials run: this host, the hosts that one trial spans, or the hosts of a cluster.

Note = Callable[[str], None]
"""Called with a sentence for the user when something delays trials."""

OnResult = Callable[[int, TrialResult], None]
"""Called with each result of a sweep and the position of its plan."""


class Place(Protocol):
    """Runs trials. Several threads may call it at once, each with one trial."""

    @property
    def can_sweep(self) -> bool: ...

    @property
    def starter_here(self) -> RankStarter | None:
        """Starts processes on this host alone; None if trials span several hosts."""

    def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
        """Runs one trial and returns its result. The trial's folder has it too."""

    def run_sweep(
        self, plans: Sequence[TrialPlan], sweep: Sweep, cancelled: threading.Event, note: Note, measured: OnResult
    ) -> list[TrialResult | Withdrawal]:
        """Returns a result for each size, or the reason why there is none."""

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """Has the ops built that trials will need, and waits. Returns the reason for each op that cannot be built.

        A cluster, whose hosts come and go, returns nothing.
        """

    @property
    def has_compiled(self) -> bool:
        """Whether it has compiled ops beside trials, whose times do not count then."""

    def prime(self, imported: Sequence[Import]) -> None:
        """Imports the modules of the profile trial ahead, so that later trials start faster."""

    def close(self) -> None: ...


class ThisHost:
    """The slots of this host. If the starter reaches other hosts, `host` has their slots too."""

    def __init__(self, starter: RankStarter, host: Host, lock_dir: Path, is_one: bool = True) -> None:
        self._starter = starter
        self._host = host
        self._lock_dir = lock_dir
        self.can_sweep = True
        self.starter_here = starter if is_one else None

    def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note = lambda text: None) -> TrialResult:
        begin(plan)
        label = f"trial {plan.number:04d}"
        with self._slots_for([plan], label, cancelled, note) as (slots, port, waited):
            kills_before, started_at, launched_at = kernel_kills(), time.time(), time.monotonic()
            devices: list[TrialDevice] = []
            ending = ProcessesEnd("cancel", [])
            if slots is not None:
                # The ranks run to their end.
                request = request_of(plan, order_of(plan), self._host, slots, port, plan.deadline_s)
                with watched(self._host, slots.names) as watch, noting_standing_ranks(label, states_of(plan), note):
                    ending = run_to_end(request, self._starter, cancelled)
                    watch.await_release(cancelled.is_set, lambda text: note(f"{label}: {text}"))
                    devices = watch.take()
                # What they have left behind.
                note_shared_memory(ending, label, note)
                note_devices(devices, label, note)
                put_away(plan.paths.scratch)
        killed, seconds = has_killed(kills_before), time.monotonic() - launched_at
        return take_result(plan, ending, killed, self._host.device, started_at, seconds, devices=devices, waited=waited)

    def run_sweep(
        self, plans: Sequence[TrialPlan], sweep: Sweep, cancelled: threading.Event, note: Note, measured: OnResult
    ) -> list[TrialResult | Withdrawal]:
        """Measures the sizes of a sweep in one process group, while they fit.

        Each size that ran is a trial, and its result is also in its folder. The folder of any other size is removed.
        """
        for plan in plans:
            begin(plan)
        plans[0].paths.withdrawal.unlink(missing_ok=True)
        first = plans[0]
        label = f"trials {first.number:04d} to {plans[-1].number:04d}"
        with self._slots_for(plans, label, cancelled, note) as (slots, port, waited):
            kills_before = kernel_kills()
            collector = _Collector(plans, self._host.device, time.time(), measured, waited)
            ending = ProcessesEnd("cancel", [])
            if slots is not None:
                order = _order(plans, sweep)
                # The group's own deadline, in case the driver dies. Each size has its own below.
                deadline_s = sum(plan.deadline_s for plan in plans)
                request = request_of(first, order, self._host, slots, port, deadline_s)
                # The ranks run in a thread. This one takes each result as soon as all ranks have measured its size.
                over, is_overdue = threading.Event(), False
                with contextlib.ExitStack() as watching, ThreadPoolExecutor(1) as thread:
                    watch = watching.enter_context(watched(self._host, slots.names))
                    collector.watch = watch.take
                    for plan in plans:
                        watching.enter_context(noting_standing_ranks(f"trial {plan.number:04d}", states_of(plan), note))
                    running = thread.submit(run_to_end, request, self._starter, over, collector.launched)
                    try:
                        while wait([running], timeout=_POLL_S).not_done:
                            collector.take_measured()
                            is_overdue = is_overdue or collector.is_overdue
                            if cancelled.is_set() or is_overdue:
                                over.set()
                    finally:
                        over.set()
                    ending = running.result()
                    # The last size ends with the group. Its devices are looked at when the driver has let go of them.
                    watch.await_release(cancelled.is_set, lambda text: note(f"{label}: {text}"))
                    collector.take_measured()
                    last = watch.take()
                    collector.watch = lambda: last
                # What the group has left behind.
                note_shared_memory(ending, label, note)
                if ending.ended_by == "cancel" and is_overdue and not cancelled.is_set():
                    ending = replace(ending, ended_by="deadline")
                for plan in plans:
                    put_away(plan.paths.scratch)
        # The last size, and why the others were not measured.
        reason = collector.take_last(ending, has_killed(kills_before), note)
        for result in collector.results:
            note_devices(result.devices, f"trial {result.number:04d}", note)
        unmeasured = plans[len(collector.results) :]
        for plan in unmeasured:
            shutil.rmtree(plan.paths.root, ignore_errors=True)
        return [*collector.results, *[reason] * len(unmeasured)]

    @contextlib.contextmanager
    def _slots_for(
        self, plans: Sequence[TrialPlan], label: str, cancelled: threading.Event, note: Note
    ) -> Iterator[tuple[HeldSlots | None, int, WaitedForSlots | None]]:
        """Yields the slots of a process group, a port, and the wait; no slots if it was cancelled."""
        first, slot_wait = plans[0], SlotWait(label, note, [plan.paths for plan in plans])
        self._starter.prepare(first.purpose is Purpose.PROFILE, first.program.starts_cold)
        is_cancelled, count = cancelled.is_set, first.candidate.slots
        with (
            held_slots(
                self._lock_dir, self._host, count, is_cancelled, slot_wait.tell, first.preferred, first.trial_id
            ) as slots,
            reserved_port() as port,
        ):
            slot_wait.end(slots is not None)
            if slots is not None:
                for plan in plans:
                    plan.paths.scratch.mkdir(mode=OWNERS_FOLDER)
            yield slots, port, slot_wait.waited

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        return self._starter.build(builders)

    @property
    def has_compiled(self) -> bool:
        return self._starter.has_compiled

    def prime(self, imported: Sequence[Import]) -> None:
        self._starter.prime(imported)

    def close(self) -> None:
        self._starter.close()


# The records of a trial, and its order.


def unstarted(plan: TrialPlan, outcome: Outcome, reason: str, from_outside: bool = False) -> TrialResult:
    return TrialResult(
        **_of_plan(plan), outcome=outcome, reason=reason, from_outside=from_outside, started_at=time.time()
    )


def _of_plan(plan: TrialPlan) -> dict[str, Any]:
    of_plan = {
        name: getattr(plan, name) for name in ("trial_id", "number", "purpose", "name", "config_hash", "rounding")
    }
    return {**of_plan, "host": platform.node()}


def write_unstarted(plan: TrialPlan, result: TrialResult) -> None:
    """Writes the records of a trial that needs no process, because it cannot work or its result is known."""
    write_candidate(plan)
    write_whole(plan.paths.result, result.to_text())


def write_candidate(plan: TrialPlan) -> None:
    texts = {
        str(plan.paths.candidate): plan.candidate.model_dump_json(indent=2),
        str(plan.paths.ds_config): json.dumps(plan.ds_config, indent=2),
        **plan.program.files,
    }
    if plan.training_spec is not None:
        texts[str(plan.paths.training_spec)] = plan.training_spec.to_json()
    write_all(texts)


def begin(plan: TrialPlan) -> None:
    """Writes what a trial runs with, and removes the files of an interrupted run of the same trial."""
    write_candidate(plan)
    for rank in range(plan.candidate.slots):
        for path in (plan.paths.log, plan.paths.measurement, plan.paths.failure, plan.paths.engine_built):
            path(rank).unlink(missing_ok=True)
    plan.paths.waiting.unlink(missing_ok=True)
    # A resumed study would take it for the trial's end.
    plan.paths.result.unlink(missing_ok=True)
    remove(plan.paths.scratch)


def run_to_end(
    request: LaunchRequest,
    starter: RankStarter,
    cancelled: threading.Event,
    launched: Callable[[], None] = lambda: None,
) -> ProcessesEnd:
    try:
        running = starter.launch(request)
        launched()
        return running.wait_or_cancel(cancelled)
    except StarterClosedError:
        return ProcessesEnd("cancel", [])


def note_shared_memory(ending: ProcessesEnd, label: str, note: Callable[[str], None]) -> None:
    """Reports shared memory that a program has left behind and no process holds.

    A trial ends its program at any point. Locks and buffers of a data loader's workers, or of ranks that connect, are
    therefore not reported.
    """
    for done, consequence in ((REMOVED, "it was removed"), (LEFT, "remove it if it is nobody's")):
        segments = ending.shared_memory.get(done, {})
        if done == REMOVED:
            segments = {name: size for name, size in segments.items() if not name.startswith(_OF_THE_ENDED)}
        if segments:
            names = ", ".join(sorted(segments)[:_MOST_NAMES]) + (", ..." if len(segments) > _MOST_NAMES else "")
            size = bytes_shown(sum(segments.values()))
            whose = "the program left" if done == REMOVED else "meanwhile somebody left"
            note(f"{label}: {whose} {size} of shared memory in /dev/shm ({names}): {consequence}")


def states_of(plan: TrialPlan) -> list[Path]:
    return [plan.paths.state(rank) for rank in range(plan.candidate.slots)]


def order_of(plan: TrialPlan) -> RankOrder:
    return RankOrder(
        program=plan.program.target,
        local_rank_option=plan.program.local_rank_option,
        model_dir=str(plan.program.model_dir),
        scratch=str(plan.paths.scratch),
        protected_before=time.time() if plan.protected_before is None else plan.protected_before,
        patience_s=plan.patience_s,
        device=plan.device,
        launched_at=orders.now(),
        sizes=(size_order_of(plan),),
        withdrawal=str(plan.paths.withdrawal),
        hidden=tuple(map(str, hidden_folders(plan.program.model_dir, [plan.paths.root]))),
    )


def size_order_of(plan: TrialPlan) -> SizeOrder:
    """Returns the part of an order that is specific to this trial. The order of a sweep has several."""
    ranks = range(plan.candidate.slots)
    settings = {each.name: getattr(plan, each.name) for each in fields(ProbeSettings)}
    # A rank does not know which switches are layouts, under which DeepSpeed derives this number.
    overrides = {
        key: value for key, value in plan.candidate.overrides.items() if key != TRAIN_BATCH or key in plan.ds_config
    }
    return SizeOrder(
        **settings,
        arguments=plan.program.arguments,
        overrides={} if plan.as_typed else overrides,
        with_profile=plan.purpose is Purpose.PROFILE,
        logs=[str(plan.paths.log(rank)) for rank in ranks],
        measurements=[str(plan.paths.measurement(rank)) for rank in ranks],
        failures=[str(plan.paths.failure(rank)) for rank in ranks],
        states=[str(state) for state in states_of(plan)],
        engine_built=[str(plan.paths.engine_built(rank)) for rank in ranks],
    )


def request_of(
    plan: TrialPlan,
    order: RankOrder,
    host: Host,
    slots: HeldSlots,
    port: int,
    deadline_s: float,
    part: HostRanks | None = None,
) -> LaunchRequest:
    """The launch of a trial's ranks, or of those on one of several hosts. The trial's scratch folder must exist."""
    first = 0
    if part is not None:
        first, order = part.first_rank, replace(order, shares_folder=False)
    logs = [plan.paths.log(first + rank) for rank in range(len(slots.names))]
    # A sweep's trials share one layer.
    records = [plan.paths.root, *(Path(size.logs[0]).parent for size in order.sizes)]
    return LaunchRequest(
        plan.program.interpreter,
        ENTRY,
        asdict(order),
        str(plan.program.model_dir),
        rank_requests(plan.program, host, slots.names, port, logs, part),
        deadline_s,
        first_rank=first,
        descriptors=slots.descriptors,
        layer=layer_for(plan.program, plan.paths.scratch, records) if part is None else None,
        beside_builds=plan.purpose is Purpose.PROFILE,
        starts_cold=plan.program.starts_cold,
    )


def take_result(
    plan: TrialPlan,
    ending: ProcessesEnd,
    kernel_killed: bool | None,
    device: str,
    started_at: float,
    seconds: float,
    swept: bool = False,
    devices: Sequence[TrialDevice] = (),
    waited: WaitedForSlots | None = None,
) -> TrialResult:
    """Combines the ranks' records, writes the result to the trial's folder and returns it."""
    ranks = [
        read_rank_record(
            plan.paths.measurement(rank),
            plan.paths.failure(rank),
            plan.paths.log(rank),
            engine_built=plan.paths.engine_built(rank),
        )
        for rank in range(plan.candidate.slots)
    ]
    end = classify(ending, ranks, plan.deadline_s, kernel_killed, device)
    measurements = [rank.measurement for rank in ranks if rank.measurement is not None]
    first = ranks[0].measurement or Measurement(outcome=end.outcome.value)
    # What is measured of a trial that has not completed counts only in part.
    is_complete = end.outcome is Outcome.COMPLETED
    program = first.program
    if program is None and plan.purpose is Purpose.PROFILE:
        # The facts that it has found before its end.
        program = read_record(plan.paths.engine_built(0), PROGRAM)
    # The phases are those of rank 0, or of a rank that failed before it had measured.
    failed = next((rank.failure.phases for rank in ranks if rank.failure is not None), {})
    phases = dict(first.phases or failed)
    phases["end"] = max(0.0, seconds - sum(phases.values()))
    memory = Memory.of_ranks(each.memory for each in measurements)
    result = TrialResult.of(
        first,
        **_of_plan(plan),
        outcome=end.outcome,
        reason=end.reason,
        failed_rank=end.failed_rank,
        metrics=first.metrics if is_complete else {},
        profile=first.profile if is_complete else None,
        program=program,
        from_outside=is_from_outside(ending, end.outcome, ranks),
        elsewhere=any(each.elsewhere for each in measurements),
        swept=swept,
        note=" ".join(filter(None, (first.note, allocator_note(memory, plan.program.environment)))),
        memory=memory,
        phases=phases,
        logs=[rank.log for rank in ranks],
        started_at=started_at,
        devices=list(devices),
        waited=waited,
    )
    write_whole(plan.paths.result, result.to_text())
    return result


# A sweep: one launch whose ranks measure several micro-batch sizes, each of them a trial. The profile of the program as
# typed may be followed by the trial of the user's configuration, at the same size.

_DECIDED = TypeAdapter(dict[str, str])
_POLL_S = 0.05
_MEASURED = (Outcome.COMPLETED, Outcome.TOO_SLOW)
# Outcomes that a later size shows as reliably as a first one. Any other may be caused by the sizes before it.
_OUTCOMES_OF_A_LATER_SIZE = (*_MEASURED, Outcome.OUT_OF_MEMORY, Outcome.DIVERGED, Outcome.CANCELLED)


class _Collector:
    """Collects the results of a sweep in their order. The wait for slots is the first size's."""

    watch: Callable[[], list[TrialDevice]]  # returns the states of the devices during the size that has just ended

    def __init__(
        self,
        plans: Sequence[TrialPlan],
        device: str,
        started_at: float,
        measured: OnResult,
        waited: WaitedForSlots | None,
    ) -> None:
        self._waited = waited
        self.results: list[TrialResult] = []
        self._plans = plans
        self._device = device
        self._measured = measured
        # These three are the next trial's.
        self._started_at = started_at
        self._begins_at = since_boot()
        self._clock = math.inf
        self.watch = list

    def launched(self) -> None:
        """Starts the first size's time. A build before its processes start does not count."""
        self._clock = time.monotonic()

    @property
    def is_overdue(self) -> bool:
        """Whether the current size has used up its time. Builds of its ranks do not count."""
        plan, seconds = self._plans[len(self.results)], time.monotonic() - self._clock
        return seconds > plan.deadline_s and seconds > plan.deadline_s + build_seconds(plan.paths.scratch)

    def take_measured(self) -> None:
        """Collects the sizes that all ranks have measured. The last plan is left, because it ends with the group."""
        while len(self.results) + 1 < len(self._plans):
            plan = self._plans[len(self.results)]
            ranks = range(plan.candidate.slots)
            read = (read_record(plan.paths.measurement(rank), MEASUREMENT) for rank in ranks)
            # What a profile has kept may still become more.
            records = [each for each in read if each and each.outcome in _MEASURED and not each.is_kept]
            if len(records) < len(ranks):
                return
            # A rank of another host has another uptime, and its wall clock may be wrong.
            ago = min(seconds_since(record.time) for record in records)
            ended_at = max(self._begins_at, since_boot() - ago)
            self._add(self._next_result(ProcessesEnd("ranks", [0] * len(records)), False, ended_at))
            self._started_at = max(self._started_at, time.time() - (since_boot() - ended_at))  # one clock is read first
            self._begins_at = ended_at
            self._clock = time.monotonic()

    def take_last(self, ending: ProcessesEnd, kernel_killed: bool | None, note: Callable[[str], None]) -> Withdrawal:
        """Collects the size that ran when the group ended. Returns the reason why the others were not measured."""
        position = len(self.results)
        decided = read_record(self._plans[0].paths.withdrawal, _DECIDED)
        if position and decided:
            return Withdrawal(decided["reason"])
        result = self._next_result(ending, kernel_killed, since_boot())
        # An end from outside shows nothing of the program or the size. For the others, the sizes before may have used
        # up data, or pages of the host. torch does not return pages that it has locked.
        if position and (result.from_outside or result.outcome in (Outcome.OUT_OF_DATA, Outcome.OUT_OF_HOST_MEMORY)):
            return Withdrawal.ENDED
        if position and result.outcome not in _OUTCOMES_OF_A_LATER_SIZE:
            if self._plans[position].as_typed:
                note(f"your configuration gets a trial of its own: {result.reason}")
            else:
                note(f"the program cannot be run again in one process: {result.reason}")
            return Withdrawal.NOT_REPEATABLE
        self._add(result)
        return Withdrawal.ENDED

    def _next_result(self, ending: ProcessesEnd, kernel_killed: bool | None, ended_at: float) -> TrialResult:
        position = len(self.results)
        return take_result(
            self._plans[position],
            ending,
            kernel_killed,
            self._device,
            self._started_at,
            ended_at - self._begins_at,
            swept=position > 0,
            devices=self.watch(),
            waited=self._waited if position == 0 else None,
        )

    def _add(self, result: TrialResult) -> None:
        self.results.append(result)
        self._measured(len(self.results) - 1, result)


def _order(plans: Sequence[TrialPlan], sweep: Sweep) -> RankOrder:
    sizes = []
    environment = dict(plans[0].program.environment)
    for plan in plans:
        own = plan.program.environment
        gone: dict[str, str | None] = {name: None for name in environment if name not in own}
        changed = {name: value for name, value in own.items() if environment.get(name) != value}
        sizes.append(replace(size_order_of(plan), environment={**gone, **changed}))
        environment = own
    order = order_of(plans[0])
    return replace(order, sizes=tuple(sizes), bytes_per_sample=sweep.bytes_per_sample, headroom=sweep.headroom)
