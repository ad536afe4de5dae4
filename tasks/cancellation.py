"""Cancellation of a run by Prefect's API, as by the Cancel button.

its worker lives     the worker sends SIGTERM to the run's process
its worker has died  the run asks the server
it has no worker     so does a command's run, and that of a full experiment within a study
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.states import Running
from rich.console import Console

from zerotune.tasks.telling import impatient, told_if_possible
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.units import duration
from zerotune.trial_lib.study.history import waiting_trials

_PERIOD_S, _PATIENCE_S = 3.0, 4.0
# Read at the start of this process, when a process worker is still its parent.
_PARENT = os.getppid()

_asked_for: set[str] = set()
_cancelled = threading.Event()


def hear_cancellation(tell: Callable[[str], None]) -> None:
    """Ends the run if it has been cancelled and no worker tells it so. Call it in waiting loops: it returns at once.
    Raises KeyboardInterrupt: the run has been cancelled.

    Args:
        tell: called with a sentence that says so.
    """
    run = str(flow_run.id)
    if run not in _asked_for:
        _asked_for.add(run)
        threading.Thread(target=_ask, args=(run,), daemon=True, name="cancellation").start()
    if _cancelled.is_set():
        # A full experiment passes it on to its study.
        _cancelled.clear()
        tell("The run was cancelled in Prefect.")
        raise KeyboardInterrupt


def _ask(run: str) -> None:
    # Asks for a run's state until it has ended. In a thread of its own, because the server may be slow or away.
    has_worker = os.environ.get("PREFECT__FLOW_RUN_ID") == run
    with impatient(retries=0, patience_s=_PATIENCE_S):
        client = get_client(sync_client=True)
        while True:
            time.sleep(_PERIOD_S)
            if has_worker and os.getppid() == _PARENT:
                continue
            with contextlib.suppress(Exception):
                state = client.read_flow_run(UUID(run)).state
                if state is not None and (state.is_cancelling() or state.is_cancelled()):
                    _cancelled.set()
                if state is not None and (state.is_cancelling() or state.is_final()):
                    return


def outlive_worker() -> None:
    """Lets a deployment's run continue when its worker has died. The worker reads the run's output.

    Prefect's log handler prints with rich, which ends a process whose reader has gone.
    """
    if deployment.id is not None:
        Console.on_broken_pipe = _be_quiet  # type: ignore[method-assign]


def _be_quiet(console: Console) -> None:
    console.quiet = True
    # Other code prints as well, and so do the processes that this one starts.
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def is_interrupt(error: BaseException) -> bool:
    """Returns whether Ctrl-C or SIGTERM has ended a command's run.

    A deployment's run that receives SIGTERM is left to its worker, which knows the reason and sets the state.
    """
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, TerminationSignal) and deployment.id is None)


# Waits, in Prefect: the run's log has a word now and then, and its state is named after a wait for slots.

STATE = "Waiting for slots"
_FIRST_WORD_S, _RAREST_S = 30.0, 600.0


class Waits:
    """Tells while a run waits for its trials. What waits for slots writes its own lines into the study's log."""

    def __init__(self, paths: StudyPaths, log: logging.Logger, label: Callable[[int], str]) -> None:
        self._paths, self._log, self._label = paths, log, label
        self._waits_for_slots = False
        self._began = time.monotonic()
        self._next_word = self._began + _FIRST_WORD_S

    def tell(self, running: Sequence[int]) -> None:
        """`running` are the numbers of all trials that have been started."""
        waits = list(waiting_trials(self._paths, running).values())
        waits_for_slots, now = 0 < len(waits) == len(running), time.monotonic()
        if not waits_for_slots and now >= self._next_word and running:
            seconds = now - self._began
            self._next_word = now + min(seconds, _RAREST_S)
            labels = ", ".join(f"{number:04d} {self._label(number)}" for number in running)
            get_run_logger().info("still running for %s: %s", duration(seconds), labels)
        if waits_for_slots != self._waits_for_slots:
            self._waits_for_slots = waits_for_slots
            # Not forced, so a cancellation in between stays.
            state = Running(name=STATE, message=waits[0]) if waits_for_slots else Running()
            with told_if_possible(self._log):
                get_client(sync_client=True).set_flow_run_state(flow_run.id, state)
