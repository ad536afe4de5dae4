"""Runs the user's program at full length, without probe and deadline, and restarts it after a crash."""

import math
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerotune.trial_lib.device.base import Host, has_killed, kernel_kills
from zerotune.trial_lib.launch.locks import reserved_port
from zerotune.trial_lib.launch.outcome import RankRecord, classify, is_from_outside, read_rank_record
from zerotune.trial_lib.launch.rank_starter import LaunchRequest, ProcessesEnd, Program, RankStarter, rank_requests
from zerotune.trial_lib.launch.slots import HeldSlots, SlotWait, held_slots
from zerotune.trial_lib.launch.trial import run_to_end
from zerotune.trial_lib.messages.files import MetricsReader
from zerotune.trial_lib.messages.orders import TrainingOrder
from zerotune.trial_lib.records.folders import FullExperimentPaths
from zerotune.trial_lib.records.result import Outcome, as_sentence

_ENTRY = "zerotune.trial_lib.rank.rank:train"

# The user's class breaks the API, and would do so again.
_INVALID_TRIAL = "InvalidTrialError"
_INVALID_TRIAL_LINE = re.compile(rf"^(?:\w+\.)*{_INVALID_TRIAL}: (.+)$", re.MULTILINE)


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass(frozen=True)
class TrainingPlan:
    program: Program  # the user's program
    slots: int  # the number of devices that it takes
    paths: FullExperimentPaths  # its files
    max_restarts: int  # how often it is restarted after a crash
    ds_config: dict[str, Any] = field(default_factory=dict)  # the DeepSpeed configuration to train with
    # Whether the program's code contains its configuration. `ds_config` is then merged into that one.
    is_in_code: bool = False
    turned: dict[str, Any] = field(default_factory=dict)  # the switches that its ranks turn, by name


@dataclass(frozen=True)
class TrainingEnd:
    completed: bool  # whether the program has returned on every rank
    reason: str = ""  # one sentence that the user can act on. Empty if the training completed.


def run_training(
    plan: TrainingPlan,
    starter: RankStarter,
    host: Host,
    lock_dir: Path,
    cancelled: threading.Event,
    note: Callable[[str], None],
    starting: Callable[[list[str]], None],
) -> TrainingEnd:
    """Trains to the end of the program, and restarts it after a crash, with growing pauses.

    An attempt has succeeded if every rank has recorded that its program returned. Exit statuses do not count. If two
    attempts end with the same message and no progress between them, there is no third, because it would end so too.
    `starting` is called with the slots before each attempt, when no rank runs.
    """
    slot_wait = SlotWait("the training", note)
    starter.prepare(beside_builds=False, starts_cold=plan.program.starts_cold)
    with held_slots(lock_dir, host, plan.slots, cancelled.is_set, slot_wait.tell, what=plan.paths.root.name) as slots:
        slot_wait.end(slots is not None)
        if slots is None:
            return TrainingEnd(False, "Cancelled before it started.")
        attempts = plan.max_restarts + 1
        pause_s = _FIRST_PAUSE_S
        before: tuple[str, tuple[int, str]] | None = None
        for attempt in range(1, attempts + 1):
            starting(slots.names)
            end = _attempt(plan, starter, host, slots, cancelled)
            if end.outcome is Outcome.COMPLETED:
                return TrainingEnd(True)
            if end.outcome is Outcome.CANCELLED or end.is_invalid:
                return TrainingEnd(False, end.reason)
            crashed = f"attempt {attempt} of {attempts} crashed: {end.reason}"
            now = (end.reason, _progress(plan.paths))
            if now == before and not end.is_from_outside:
                note(f"{crashed} (as the one before, with no progress since: it is not started again)")
                return TrainingEnd(
                    False,
                    f"{end.reason} Attempts {attempt - 1} and {attempt} of {attempts} ended so, with no progress "
                    "between them: another would, too.",
                )
            before = now
            if attempt == attempts:
                note(f"{crashed} (max_restarts is {plan.max_restarts})")
                break
            note(f"{crashed} (it starts again in {pause_s:.0f} s)")
            if cancelled.wait(pause_s):
                return TrainingEnd(False, "Cancelled before it started again.")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return TrainingEnd(False, f"{end.reason} That was attempt {attempts} of {attempts}.")


def _progress(paths: FullExperimentPaths) -> tuple[int, str]:
    batch = max((record.batch for record in MetricsReader(paths.metrics).read()), default=0)
    return batch, max((path.name for path in paths.checkpoints.glob("batch-*")), default="")


@dataclass(frozen=True)
class _AttemptEnd:
    outcome: Outcome  # the outcome, as a trial has it
    reason: str  # one sentence
    # Whether any attempt would end the same way, because the trial class breaks the API, or because DeepSpeed refuses a
    # key of the configuration
    is_invalid: bool = False
    # Whether the ranks or their guard were killed from outside. The next attempt may succeed.
    is_from_outside: bool = False


def _attempt(
    plan: TrainingPlan, starter: RankStarter, host: Host, slots: HeldSlots, cancelled: threading.Event
) -> _AttemptEnd:
    # Runs the ranks once.
    paths, ranks = plan.paths, range(plan.slots)
    for path in (paths.finished, *map(paths.rank_finished, ranks), *map(paths.rank_failure, ranks)):
        path.unlink(missing_ok=True)
    logs_before = [_size(paths.rank_log(rank)) for rank in ranks]
    kills_before = kernel_kills()
    with reserved_port() as port:
        ending = _run(plan, starter, host, slots, port, cancelled)
    records = [
        read_rank_record(
            paths.rank_finished(rank), paths.rank_failure(rank), paths.rank_log(rank), log_start=logs_before[rank]
        )
        for rank in ranks
    ]
    end = classify(ending, records, math.inf, has_killed(kills_before), host.device)
    outcome = end.outcome
    invalid = None if outcome is Outcome.COMPLETED else _broken_api(records)
    if cancelled.is_set() and outcome is not Outcome.COMPLETED:
        return _AttemptEnd(Outcome.CANCELLED, "Cancelled while it ran.")
    if invalid is not None:
        return _AttemptEnd(outcome, invalid, is_invalid=True)
    failures = [record.failure for record in records if record.failure is not None]
    is_refused = any(failure.refusal or failure.elsewhere for failure in failures)
    from_outside = is_from_outside(ending, outcome, records)
    return _AttemptEnd(outcome, end.reason, is_invalid=is_refused, is_from_outside=from_outside)


def _run(
    plan: TrainingPlan, starter: RankStarter, host: Host, slots: HeldSlots, port: int, cancelled: threading.Event
) -> ProcessesEnd:
    program, ranks = plan.program, range(plan.slots)
    order = TrainingOrder(
        program=program.target,
        local_rank_option=program.local_rank_option,
        arguments=program.arguments,
        ds_config=plan.ds_config,
        is_in_code=plan.is_in_code,
        turned=plan.turned,
        device=host.device,
        finished=[str(plan.paths.rank_finished(rank)) for rank in ranks],
        failures=[str(plan.paths.rank_failure(rank)) for rank in ranks],
    )
    requests = rank_requests(program, host, slots.names, port, [plan.paths.rank_log(rank) for rank in ranks])
    request = LaunchRequest(
        program.interpreter,
        _ENTRY,
        asdict(order),
        str(program.model_dir),
        requests,
        math.inf,
        descriptors=slots.descriptors,
    )
    return run_to_end(request, starter, cancelled)


def _broken_api(records: list[RankRecord]) -> str | None:
    # The trial class's fault, if it ended the attempt.
    for record in records:
        message: str | None = None
        if record.failure is None:
            found = _INVALID_TRIAL_LINE.search(record.log_tail)
            message = found and found.group(1)
        elif record.failure.type == _INVALID_TRIAL:
            message = record.failure.message
        if message:
            return f"{as_sentence(' '.join(message.split()))} Log: {record.log}"
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
