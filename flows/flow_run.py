"""A flow's run against a Prefect server: what it costs is bounded, and Prefect's own lines stay off the terminal."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flows.interrupts import Aside, interrupts
from flows.prefect_server import PrefectServer, require_configured_server

if TYPE_CHECKING:
    from prefect import Flow

# Some fifteen seconds of patience with a Prefect server that has gone away: one of the command's own is back by then.
_RETRIES = 3
# One that is there and hangs.
_PATIENCE_S = 10.0
# All that telling the server may take once there is nothing else left to do: Prefect says much, each thing in its turn.
# With the ten seconds in which the answer may have waited for it, half a minute.
END_S = 20.0
_LONGEST_LINE, _AGAIN_S = 500, 60.0
_OF_RUNS = ("prefect.flow_runs", "prefect.task_runs")


def run_flow(
    server: PrefectServer | None,
    load: Callable[[], "Flow[..., Any]"],
    names: Sequence[str],
    log: logging.Logger,
    is_down: Callable[[], bool],
    check: Callable[[], None] = lambda: None,
    **parameters: Any,
) -> None:
    """Runs a flow against a server, and returns when that has its whole history, or has gone away.

    Args:
        server: one that is coming up; None for the user's own.
        load: imports the flow, which has to know the server by then.
        names: of the flow's run, and of those within it.
        log: of what is run.
        is_down: whether the flow has nothing left to do but to tell the server how it ended.
        check: called before the server is waited for: what it raises ends the command.
        parameters: of the flow.

    Raises:
        InputError: the check says so.
        ServerError: the server does not answer.
    """
    if server is not None:
        server.use()
    os.environ.setdefault("DO_NOT_TRACK", "1")
    flow = interrupts.aside(load)
    from tasks.without_secrets import keep_secrets_from_prefect

    keep_secrets_from_prefect()
    keep_lines_of_prefect(log)
    check()
    if server is None:
        require_configured_server()
    else:
        server.wait_until_ready()
        log.debug("the Prefect server is ready")
    run = _Run(lambda: flow.with_options(flow_run_name=names[0])(**parameters, return_state=True), names, log)
    try:
        if not ended_in_time(run, is_down, END_S):
            log.debug("Prefect was still being told how it ended after %.0f s", END_S)
    finally:
        if run.is_told:
            log.debug("Prefect has the whole history")
        else:
            from tasks.telling import say_once

            say_once(
                log, "Prefect has not recorded everything: its server is away, or too slow. The folder has it all."
            )
            interrupts.prefect_is_away = True


class _Run:
    """The flow, and then the wait for its history.

    Attributes:
        is_told: whether the server has recorded all of it.
    """

    def __init__(self, run: Callable[[], Any], names: Sequence[str], log: logging.Logger) -> None:
        self.is_told = False
        self._run, self._names, self._log = run, names, log

    def __call__(self) -> None:
        import httpx
        from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        from tasks.run_history import wait_for_history

        patience = {PREFECT_CLIENT_MAX_RETRIES: _RETRIES, PREFECT_API_REQUEST_TIMEOUT: _PATIENCE_S}
        try:
            with temporary_settings(set_defaults=patience):
                self._run()
        except httpx.HTTPError as error:
            # Of the flow's own state: whatever else Prefect is told, it does without.
            self._log.debug("Prefect was not told how it ended: %s: %s", type(error).__name__, error)
        finally:
            self.is_told = all(wait_for_history(name) for name in self._names)


def ended_in_time(work: Callable[[], None], is_down: Callable[[], bool], limit_s: float) -> bool:
    """Waits for the end of work, and leaves it to itself where it takes too long.

    Args:
        work: what is done, in a thread of its own.
        is_down: whether all that matters of it is done.
        limit_s: seconds that the rest may take from then on.

    Returns:
        Whether it has ended.

    Raises:
        BaseException: what the work raises.
    """
    aside = Aside(work)
    leave_at = None
    while aside.goes_on:
        if not is_down():
            leave_at = None
        elif leave_at is None:
            leave_at = time.monotonic() + limit_s
        elif time.monotonic() > leave_at:
            return False
        aside.wait()
    aside.result()
    return True


def keep_lines_of_prefect(log: logging.Logger) -> None:
    """Has what Prefect would print go to a log, as what is not for people; its server gets its own lines all the same.

    Args:
        log: of what is run.
    """
    from prefect.logging import handlers
    from prefect.logging.configuration import setup_logging

    setup_logging()
    kept = _Kept(log)
    for logger in [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]:
        for handler in list(logger.handlers):
            # Its own errors go by a plain stream.
            if isinstance(handler, logging.StreamHandler) and type(handler).__module__ == handlers.__name__:
                logger.removeHandler(handler)
                # With none at all, Python itself would print a warning.
                logger.addHandler(kept)
    # What a log cannot send to the server is said here in one sentence; Prefect, like Python, would print the error.
    logging.raiseExceptions = False


class _Kept(logging.Handler):
    """Passes another's lines on to a log's file."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._said_at: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Passes one line on, without what it would take pages to say; the same complaint once a minute."""
        # What the flow and its tasks say stands in the log already.
        if record.name.startswith(_OF_RUNS):
            return
        complaint, now = (record.name, str(record.msg)), time.monotonic()
        if now < self._said_at.get(complaint, -_AGAIN_S) + _AGAIN_S:
            return
        self._said_at[complaint] = now
        try:
            said = record.getMessage()
        except (TypeError, ValueError, KeyError):
            # Its words do not fit its arguments. As under Python's own handlers, whoever logs does not fail by it.
            said = str(record.msg)
        cut = said if len(said) <= _LONGEST_LINE else f"{said[:_LONGEST_LINE]}…"
        self._log.debug("%s: %s", record.name, cut)
