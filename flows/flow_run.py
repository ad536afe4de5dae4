"""A flow's run against a Prefect server. Its cost is bounded, and Prefect's own lines stay off the terminal."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerotune.flows.interrupts import Aside, interrupts
from zerotune.flows.prefect_server import PrefectServer, require_configured_server
from zerotune.trial_lib.records.folders import FullExperimentRecord, StudyRecord, StudyStatus
from zerotune.trial_lib.study.open_study import OpenStudy

if TYPE_CHECKING:
    from prefect import Flow


# Some fifteen seconds for a Prefect server that does not answer. The command's own has been started again by then.
_RETRIES = 3
# For a server that accepts requests and hangs.
_PATIENCE_S = 10.0
# The time for Prefect's last records once the study has ended. Prefect sends many, one after another. Before that the
# answer may have waited `_PATIENCE_S`, so a command ends within half a minute.
END_S = 20.0
# The first request may wait for a server of the command's own, which has to be started again.
_FIRST_S = 90.0
_NOT_REACHED = "Failed to reach API"
_LONGEST_LINE, _AGAIN_S = 500, 60.0
_OF_RUNS = ("prefect.flow_runs", "prefect.task_runs")


def run_flow(
    server: PrefectServer | None,
    load: Callable[[], "Flow[..., Any]"],
    names: Sequence[str],
    log: logging.Logger,
    is_down: Callable[[], bool],
    check: Callable[[], None] = lambda: None,
    begin: Callable[[], None] = lambda: None,
    *,
    has_begun: Callable[[], bool],
    **parameters: Any,
) -> None:
    """Runs a flow against a server. Returns when the server has the flow's whole history, or does not answer any more.

    Args:
        server: the command's own server, which is starting. None for the user's.
        load: imports the flow. It is called when the environment names the server.
        is_down: whether nothing but the record of the flow's end is missing.
        check: called before the wait for the server. Its error ends the command.
        begin: called when nothing but the command's own server is missing. It begins what needs no server.
        has_begun: whether the flow has come to its work. Until then the server may be silent, and the flow is tried
            again for a while. Then it runs without a server.

    Raises:
        InputError: `check` has found wrong input.
        ServerError: the server does not answer.
    """
    # Prefect reads the environment when it is imported. So the server is named before.
    if server is not None:
        server.use()
    os.environ.setdefault("DO_NOT_TRACK", "1")
    flow = interrupts.aside(load)
    if server is not None:
        server.start()
    from zerotune.tasks.telling import keep_secrets_from_prefect

    keep_secrets_from_prefect()
    keep_lines_of_prefect(log)
    named = flow.with_options(flow_run_name=names[0])
    check()
    if server is None:
        require_configured_server()
        begin()
    else:
        begin()
        interrupts.aside(_import_engines)
        server.wait_until_ready()
        log.debug("the Prefect server is ready")
    # The flow runs, and its history arrives.
    first = _until_begun(named, parameters, has_begun, log, 0.0 if server is None else _FIRST_S)
    run = _Run(first, names, log, has_heartbeats=server is None)
    try:
        if not ended_in_time(run, is_down, END_S):
            log.debug("Prefect has not recorded the end after %.0f s", END_S)
    finally:
        if run.is_told:
            log.debug("Prefect has the whole history")
        else:
            from zerotune.tasks.telling import say_once

            say_once(log, "Prefect has not recorded everything: its server is down or too slow. The folder has it all.")
            interrupts.prefect_is_away = True


def _import_engines() -> None:
    # Imports what Prefect imports when a flow and its first task begin. Until then the server is only starting.
    import fastapi.encoders  # noqa: F401 - kept by Python
    import prefect.flow_engine
    import prefect.task_engine
    import prefect.utilities.visualization  # noqa: F401


def _until_begun(
    flow: "Flow[..., Any]",
    parameters: dict[str, Any],
    has_begun: Callable[[], bool],
    log: logging.Logger,
    patience_s: float,
) -> Callable[[], Any]:
    # A function that runs a flow, without its server if that has been silent for too long before it begins.

    def run_in_the_end() -> None:
        import httpx

        until = time.monotonic() + patience_s
        while True:
            try:
                flow(**parameters, return_state=True)
                return
            except (httpx.HTTPError, RuntimeError) as error:
                # Prefect's client raises a plain error if it cannot ask for the server's version.
                is_silent = isinstance(error, httpx.HTTPError) or _NOT_REACHED in str(error)
                if not is_silent or has_begun() or interrupts.heard:
                    raise
                if time.monotonic() > until:
                    from zerotune.tasks.telling import run_unrecorded

                    run_unrecorded(flow, parameters, log, f"{type(error).__name__}: {error}")
                    return
                log.info("Prefect's server does not answer yet. Its first request is tried again.")
            time.sleep(1.0)

    return run_in_the_end


class _Run:
    """The flow, followed by the wait for its history."""

    def __init__(
        self, run: Callable[[], Any], names: Sequence[str], log: logging.Logger, has_heartbeats: bool = True
    ) -> None:
        self.is_told = False  # whether the server has recorded the whole history
        # A run with heartbeats waits at its end for their thread, which sleeps for a second at a time.
        self._run, self._names, self._log, self._has_heartbeats = run, names, log, has_heartbeats

    def __call__(self) -> None:
        import httpx
        from prefect.settings import (
            PREFECT_API_REQUEST_TIMEOUT,
            PREFECT_CLIENT_MAX_RETRIES,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            temporary_settings,
        )

        from zerotune.tasks.telling import wait_for_history

        patience = {PREFECT_CLIENT_MAX_RETRIES: _RETRIES, PREFECT_API_REQUEST_TIMEOUT: _PATIENCE_S}
        unheard = {} if self._has_heartbeats else {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
        try:
            with temporary_settings(updates=unheard, set_defaults=patience):
                self._run()
        except httpx.HTTPError as error:
            # Only the state of the flow itself raises. All other records may fail.
            self._log.debug("Prefect has not recorded the end: %s: %s", type(error).__name__, error)
        finally:
            self.is_told = all(wait_for_history(name) for name in self._names)


def ended_in_time(work: Callable[[], None], is_down: Callable[[], bool], limit_s: float) -> bool:
    """Runs work in another thread, and raises its error. Stops waiting `limit_s` after its last part has begun.
    Returns whether it has ended.
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
    """Sends the lines that Prefect would print to a log's file. Prefect's server still gets its own lines."""
    from prefect.logging import handlers
    from prefect.logging.configuration import setup_logging

    setup_logging()
    kept = _Kept(log)
    for logger in [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]:
        for handler in list(logger.handlers):
            # Prefect prints its own errors with a plain stream handler.
            if isinstance(handler, logging.StreamHandler) and type(handler).__module__ == handlers.__name__:
                logger.removeHandler(handler)
                # Without any handler, Python itself would print warnings.
                logger.addHandler(kept)
    # `run_flow` reports lost records in one sentence. Prefect, like Python, would print each error.
    logging.raiseExceptions = False


class _Kept(logging.Handler):
    def __init__(self, log: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._said_at: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Passes one line on, shortened to `_LONGEST_LINE`. A repeated line is passed on once a minute."""
        # The log has the lines of the flow and its tasks already.
        if record.name.startswith(_OF_RUNS):
            return
        complaint, now = (record.name, str(record.msg)), time.monotonic()
        if now < self._said_at.get(complaint, -_AGAIN_S) + _AGAIN_S:
            return
        self._said_at[complaint] = now
        try:
            said = record.getMessage()
        except (TypeError, ValueError, KeyError):
            # The format does not fit its arguments. As with Python's own handlers, the caller must not fail.
            said = str(record.msg)
        cut = said if len(said) <= _LONGEST_LINE else f"{said[:_LONGEST_LINE]}…"
        self._log.debug("%s: %s", record.name, cut)


# The study of a run, as the flow and the command that started it share it.


@dataclass
class RunningStudy:
    """The study that a flow runs.

    A command opens its study before the flow starts, so that the fork server is primed while Prefect starts. It hands
    this object to the flow (`zerotune.flows.tune.tune_open`), and reads here how the flow left the study.
    """

    study: OpenStudy  # the open study. The flow replaces it when it resumes a search that failed.
    is_refused: bool = False  # whether the study has failed because the input is wrong. False if it was interrupted.
    training_failure: str | None = None  # why the full experiment failed; None if it did not
    has_begun: bool = False  # whether the flow has come to the study

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leaves the study here. Prefect sends the flow to Ray with each task, which needs only its name."""
        return _StudyElsewhere, ()

    def interrupt(self) -> None:
        """Interrupts the study. It may be called from any thread."""
        self.study.interrupt()

    @property
    def is_down(self) -> bool:
        return self.study.is_down


class _StudyElsewhere: ...


# The end of a study: its record and its report.


def finish(study: OpenStudy, status: StudyStatus, reason: str = "") -> None:
    study.finish(status, reason)
    # A cancelled run has seconds to end in, and its study may be resumed. `zerotune show` reads it meanwhile.
    if status is not StudyStatus.CANCELLED:
        _report(study)


def missing_files(study: OpenStudy) -> list[str]:
    paths = study.paths
    answer = [paths.best_ds_config, paths.best_command, paths.best_ds_metrics, paths.report]
    return [path.name for path in answer if study.record.status is StudyStatus.COMPLETED and not path.is_file()]


def told_if_ended(what: str, record: Callable[[], StudyRecord | FullExperimentRecord], see: str) -> Callable[[], str]:
    """Returns a function for `Interrupts.ended`. What has ended before this call counts as not ended: it is resumed."""
    before = record().ended_at

    def sentence() -> str:
        now = record()
        has_ended = now.status in (StudyStatus.COMPLETED, StudyStatus.FAILED) and now.ended_at != before
        return f"Interrupted after {what} had {now.status.value}. See {see}" if has_ended else ""

    return sentence


def _report(study: OpenStudy) -> None:
    # Writes the report. If that fails, the study has still completed, and the command says so (`missing_files`).
    from zerotune.trial_lib.report.html_report import write_report

    try:
        write_report(study.paths)
    except Exception:
        # The folder has all that the report would show.
        study.driver.log.warning("the report was not written", exc_info=True)
    study.tracker.notify()
