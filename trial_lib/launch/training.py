"""The user's program at full length: fresh processes, no probe, no deadline."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trial_lib.launch.hardware import Host
from trial_lib.launch.launcher import Ending, Launcher, LaunchRequest
from trial_lib.launch.ports import reserved_port
from trial_lib.launch.program import Program, rank_requests
from trial_lib.launch.slots import held_slots

_ENTRY = "trial_lib.measure.rank:train"


@dataclass(frozen=True)
class TrainingPlan:
    """A full-length training.

    Attributes:
        program: what runs.
        slots: devices it takes.
        logs: one for each rank.
        max_restarts: how often it is started again when it has crashed.
    """

    program: Program
    slots: int
    logs: list[Path]
    max_restarts: int


def run_training(
    plan: TrainingPlan,
    launcher: Launcher,
    host: Host,
    lock_dir: Path,
    cancelled: threading.Event,
    note: Callable[[str], None],
) -> bool:
    """Trains to the program's own end; returns whether every rank ended well.

    Here exit statuses decide: they come from the guard, which is the ranks' parent.

    Args:
        plan: the training.
        launcher: starts its processes.
        host: where.
        lock_dir: the locks of slots and ports on this host.
        cancelled: set from another thread to end it.
        note: told of each crash, and of what holds the training up.
    """
    for attempt in range(plan.max_restarts + 1):
        ending = _run_once(plan, launcher, host, lock_dir, cancelled, note)
        if all(status == 0 for status in ending.statuses) and ending.statuses:
            return True
        if cancelled.is_set():
            return False
        note(f"the training crashed (exit statuses {ending.statuses}, log {plan.logs[0]}), attempt {attempt + 1}")
    return False


def _run_once(
    plan: TrainingPlan,
    launcher: Launcher,
    host: Host,
    lock_dir: Path,
    cancelled: threading.Event,
    note: Callable[[str], None],
) -> Ending:
    with (
        held_slots(lock_dir, host.slots, plan.slots, cancelled.is_set, note) as slots,
        reserved_port(lock_dir) as port,
    ):
        if slots is None:
            return Ending("cancel", [])
        program = plan.program
        payload = {
            "program": program.target,
            "arguments": program.arguments,
            "passes_local_rank": program.passes_local_rank,
        }
        ranks = rank_requests(program, host, slots, port, plan.logs)
        request = LaunchRequest(program.interpreter, _ENTRY, payload, str(program.model_dir), ranks, math.inf)
        return launcher.launch(request).wait_or_cancel(cancelled)
