"""Who has ended a run: a person, or its worker; where that has died, the run goes on, and the server is asked."""

import contextlib
import os
import time

from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from rich.console import Console

from tasks.telling import impatient

_PERIOD_S = 2.0
# As this process starts: a process worker is its parent.
_PARENT = os.getppid()


class _Server:
    """When it was asked last, in seconds of the monotonic clock."""

    asked_at = 0.0


def hear_cancellation() -> None:
    """Ends the run where it has been cancelled and its worker cannot say so; to be called again and again.

    Raises:
        KeyboardInterrupt: it has.
    """
    if os.getppid() == _PARENT or time.monotonic() < _Server.asked_at + _PERIOD_S:
        return
    _Server.asked_at = time.monotonic()
    with contextlib.suppress(Exception), impatient(retries=0):
        state = get_client(sync_client=True).read_flow_run(flow_run.id).state
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            raise KeyboardInterrupt


def outlive_worker() -> None:
    """Lets the run of a deployment go on when its worker has died, who reads what the run prints.

    Prefect's log handler prints by rich, which ends a process whose reader has gone.
    """
    if deployment.id is not None:
        Console.on_broken_pipe = _be_quiet  # type: ignore[method-assign]


def _be_quiet(console: Console) -> None:
    console.quiet = True
    # Others print as well, what this process starts among them.
    nobody = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nobody, descriptor)
    os.close(nobody)


def is_interrupt(error: BaseException) -> bool:
    """Returns whether a command's run was ended by Ctrl-C or SIGTERM.

    The run of a deployment that hears SIGTERM is not: its worker, who knows why, gives it a state.
    """
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, TerminationSignal) and deployment.id is None)
