"""Cancellation of a run, by a person or by its worker. If its worker has died, the run asks the server instead."""

import contextlib
import os
import time

from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from rich.console import Console

from tasks.telling import impatient

_PERIOD_S = 2.0
# Read at the start of this process, when a process worker is still its parent.
_PARENT = os.getppid()


class _Server:
    """The time of the last request, in seconds of the monotonic clock."""

    asked_at = 0.0


def hear_cancellation() -> None:
    """Ends the run if it has been cancelled and its worker has died. Call it in waiting loops.

    Raises:
        KeyboardInterrupt: the run has been cancelled.
    """
    if os.getppid() == _PARENT or time.monotonic() < _Server.asked_at + _PERIOD_S:
        return
    _Server.asked_at = time.monotonic()
    with contextlib.suppress(Exception), impatient(retries=0):
        state = get_client(sync_client=True).read_flow_run(flow_run.id).state
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            raise KeyboardInterrupt


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
