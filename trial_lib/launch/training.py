"""The user's program at full length: fresh processes, no probe, no deadline, started again when they die."""

import contextlib
import json
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.experiment.full_experiment import FullExperimentPaths
from trial_lib.experiment.result import Outcome
from trial_lib.launch.hardware import Host
from trial_lib.launch.launcher import Ending, Launcher, LauncherClosedError, LaunchRequest
from trial_lib.launch.outcome import RankRecord, classify, kernel_kills
from trial_lib.launch.ports import reserved_port
from trial_lib.launch.program import Program, rank_requests
from trial_lib.launch.slots import held_slots

_ENTRY = "trial_lib.measure.rank:train"
_TAIL_BYTES = 20_000

# The user's class breaks the API: it would again.
_INVALID_TRIAL = "InvalidTrialError"
_INVALID_TRIAL_LINE = re.compile(rf"^(?:\w+\.)*{_INVALID_TRIAL}: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class TrainingPlan:
    """A full-length training.

    Attributes:
        program: what runs.
        slots: devices it takes.
        paths: its files.
        max_restarts: how often it is started again when it has crashed.
    """

    program: Program
    slots: int
    paths: FullExperimentPaths
    max_restarts: int


@dataclass(frozen=True)
class TrainingEnd:
    """How a training ended.

    Attributes:
        completed: whether the program has returned on every rank.
        reason: one sentence that a person can act on; empty where it completed.
    """

    completed: bool
    reason: str = ""


def run_training(
    plan: TrainingPlan,
    launcher: Launcher,
    host: Host,
    lock_dir: Path,
    cancelled: threading.Event,
    note: Callable[[str], None],
    starting: Callable[[list[str]], None] = lambda slots: None,
) -> TrainingEnd:
    """Trains to the program's own end, and starts it again when it has crashed.

    An attempt has succeeded when every rank has left the record of its program's return; exit statuses are not asked.

    Args:
        plan: the training.
        launcher: starts its processes.
        host: where.
        lock_dir: the locks of slots and ports on this host.
        cancelled: set from another thread to end it.
        note: told of each crash, and of what holds the training up.
        starting: told the slots before each attempt, when no rank runs.
    """
    with held_slots(lock_dir, host.slots, plan.slots, cancelled.is_set, note) as slots:
        if slots is None:
            return TrainingEnd(False, "Cancelled before it started.")
        attempts = plan.max_restarts + 1
        for attempt in range(1, attempts + 1):
            starting(slots)
            outcome, reason, is_invalid = _attempt(plan, launcher, host, slots, lock_dir, cancelled)
            if outcome is Outcome.COMPLETED:
                return TrainingEnd(True)
            if outcome is Outcome.CANCELLED:
                return TrainingEnd(False, reason)
            if is_invalid:
                return TrainingEnd(False, reason)
            again = "it starts again" if attempt < attempts else f"max_restarts is {plan.max_restarts}"
            note(f"attempt {attempt} of {attempts} crashed: {reason} ({again})")
    return TrainingEnd(False, f"{reason} That was attempt {attempts} of {attempts}.")


def _attempt(
    plan: TrainingPlan,
    launcher: Launcher,
    host: Host,
    slots: list[str],
    lock_dir: Path,
    cancelled: threading.Event,
) -> tuple[Outcome, str, bool]:
    """Runs the ranks once; returns how they ended, why, and whether another attempt is bound to end the same way."""
    paths, ranks = plan.paths, range(plan.slots)
    for path in (paths.finished, *map(paths.rank_finished, ranks), *map(paths.rank_failure, ranks)):
        path.unlink(missing_ok=True)
    logs_before = [_size(paths.rank_log(rank)) for rank in ranks]
    kills_before = kernel_kills()
    with reserved_port(lock_dir) as port:
        ending = _run(plan, launcher, host, slots, port, cancelled)
    records = [
        RankRecord(
            _read(paths.rank_finished(rank)),
            _read(paths.rank_failure(rank)),
            _tail(paths.rank_log(rank), logs_before[rank]),
            str(paths.rank_log(rank)),
        )
        for rank in ranks
    ]
    outcome, reason = classify(ending, records, math.inf, kernel_kills() > kills_before)
    invalid = None if outcome is Outcome.COMPLETED else _broken_api(records)
    if cancelled.is_set() and outcome is not Outcome.COMPLETED:
        return Outcome.CANCELLED, "Cancelled while it ran.", False
    return (outcome, reason, False) if invalid is None else (outcome, invalid, True)


def _run(
    plan: TrainingPlan, launcher: Launcher, host: Host, slots: list[str], port: int, cancelled: threading.Event
) -> Ending:
    program, ranks = plan.program, range(plan.slots)
    payload = {
        "program": program.target,
        "arguments": program.arguments,
        "passes_local_rank": program.passes_local_rank,
        "finished": [str(plan.paths.rank_finished(rank)) for rank in ranks],
        "failures": [str(plan.paths.rank_failure(rank)) for rank in ranks],
    }
    requests = rank_requests(program, host, slots, port, [plan.paths.rank_log(rank) for rank in ranks])
    request = LaunchRequest(program.interpreter, _ENTRY, payload, str(program.model_dir), requests, math.inf)
    try:
        return launcher.launch(request).wait_or_cancel(cancelled)
    except LauncherClosedError:
        return Ending("cancel", [])


def _broken_api(records: list[RankRecord]) -> str | None:
    """Returns what the trial class does wrong, if that is what ended the attempt."""
    for record in records:
        message: str | None = None
        if record.failure is None:
            found = _INVALID_TRIAL_LINE.search(record.log_tail)
            message = found and found.group(1)
        elif record.failure["type"] == _INVALID_TRIAL:
            message = record.failure["message"]
        if message:
            return f"{' '.join(message.split())} Log: {record.log}"
    return None


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, json.JSONDecodeError):
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> str:
    """Returns the end of a log, of this attempt alone."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""
