"""A sweep: one launch whose ranks measure several micro-batch sizes, each of them a trial.

The profile of the program as typed may be followed by the trial of the user's configuration, at the same size.
"""

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from zerotune.trial_lib.device.base import Host, has_killed, kernel_kills
from zerotune.trial_lib.launch.device_watch import note_devices, noting_standing_ranks, watched
from zerotune.trial_lib.launch.outcome import MEASUREMENT, read_record
from zerotune.trial_lib.launch.rank_starter import ProcessesEnd, RankStarter
from zerotune.trial_lib.launch.trial import (
    TrialPlan,
    begin,
    note_shared_memory,
    order_of,
    request_of,
    run_to_end,
    size_order_of,
    slots_for,
    states_of,
    take_result,
)
from zerotune.trial_lib.launch.trial_files import put_away
from zerotune.trial_lib.messages.build_times import seconds as build_seconds
from zerotune.trial_lib.messages.orders import RankOrder, seconds_since, since_boot
from zerotune.trial_lib.records.candidate import Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialDevice, TrialResult, WaitedForSlots

_DECIDED = TypeAdapter(dict[str, str])
_POLL_S = 0.05
_MEASURED = (Outcome.COMPLETED, Outcome.TOO_SLOW)
# Outcomes that a later size shows as reliably as a first one. Any other may be caused by the sizes before it.
_OUTCOMES_OF_A_LATER_SIZE = (*_MEASURED, Outcome.OUT_OF_MEMORY, Outcome.DIVERGED, Outcome.CANCELLED)


def run_sweep(
    plans: Sequence[TrialPlan],
    sweep: Sweep,
    starter: RankStarter,
    host: Host,
    lock_dir: Path,
    cancelled: threading.Event,
    note: Callable[[str], None],
    measured: Callable[[int, TrialResult], None],
) -> list[TrialResult | Withdrawal]:
    """Measures the sizes of a sweep in one process group, while they fit.

    Each size that ran is a trial, and its result is also in its folder. The folder of any other size is removed.
    """
    for plan in plans:
        begin(plan)
    plans[0].paths.withdrawal.unlink(missing_ok=True)
    first = plans[0]
    label = f"trials {first.number:04d} to {plans[-1].number:04d}"
    with slots_for(plans, label, starter, host, lock_dir, cancelled, note) as (slots, port, waited):
        kills_before = kernel_kills()
        collector = _Collector(plans, host.device, time.time(), measured, waited)
        ending = ProcessesEnd("cancel", [])
        if slots is not None:
            order = _order(plans, sweep)
            # The group's own deadline, in case the driver dies. Each size has its own below.
            deadline_s = sum(plan.deadline_s for plan in plans)
            request = request_of(first, order, host, slots, port, deadline_s)
            # The ranks run in a thread. This one takes each result as soon as all ranks have measured its size.
            over, is_overdue = threading.Event(), False
            with contextlib.ExitStack() as watching, ThreadPoolExecutor(1) as thread:
                watch = watching.enter_context(watched(host, slots.names))
                collector.watch = watch.take
                for plan in plans:
                    watching.enter_context(noting_standing_ranks(f"trial {plan.number:04d}", states_of(plan), note))
                running = thread.submit(run_to_end, request, starter, over, collector.launched)
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


class _Collector:
    """Collects the results of a sweep in their order. The wait for slots is the first size's."""

    watch: Callable[[], list[TrialDevice]]  # returns the states of the devices during the size that has just ended

    def __init__(
        self,
        plans: Sequence[TrialPlan],
        device: str,
        started_at: float,
        measured: Callable[[int, TrialResult], None],
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
