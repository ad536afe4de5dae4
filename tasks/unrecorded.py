"""The run of a flow that its silent server did not take. It runs without one, which gets it when it is back.

Prefect's engine begins no flow before the server has its run. The server chooses the run's id, so it cannot have what
happened before.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.filesystems import LocalFileSystem, NullFileSystem
from prefect.results import ResultStore
from prefect.settings import PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED, temporary_settings
from prefect.states import Failed, Running, State

from tasks.telling import impatient, say_away, told_if_possible

_PERIOD_S = 5.0


def run_unrecorded(flow: Flow[..., Any], parameters: dict[str, Any], log: logging.Logger, reason: str) -> None:
    """Runs a flow without its server.

    Args:
        flow: with the name of its run.
        parameters: its parameters.
        log: of the study or the full experiment.
        reason: why the server has not taken the run.
    """
    say_away(log, f"Prefect's server did not take this run ({reason}). It goes on, and its folder has all records.")
    run = _Run(flow, parameters)
    EventsWorker.set_client_override(NullEventsClient)
    unchecked = temporary_settings({PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False})
    with unchecked, flow.task_runner.duplicate() as task_runner:
        nowhere = ResultStore(result_storage=LocalFileSystem(), metadata_storage=NullFileSystem())
        client = get_client(sync_client=True)
        with (
            FlowRunContext(
                flow=flow,
                flow_run=run.run,
                parameters=parameters,
                client=client,
                task_runner=task_runner,
                result_store=nowhere,
                persist_result=False,
            ),
            run.told_later(log),
        ):
            try:
                run.end = flow.fn(**parameters)
            except Exception as error:
                log.debug("the flow has failed", exc_info=True)
                run.end = Failed(message=f"{type(error).__name__}: {error}")


class _Run:
    """The run, which is the server's as soon as it answers.

    Attributes:
        run: as the flow and its tasks see it.
        end: the state in which it ended.
    """

    def __init__(self, flow: Flow[..., Any], parameters: dict[str, Any]) -> None:
        self.run = FlowRun(id=uuid4(), flow_id=uuid4(), name=str(flow.flow_run_name))
        self.end: State[Any] | None = None
        self._flow, self._parameters = flow, parameters
        self._is_recorded = False
        self._one = threading.Lock()
        self._over = threading.Event()

    @contextlib.contextmanager
    def told_later(self, log: logging.Logger) -> Iterator[None]:
        """Tells the server of the run while the body runs, as soon as it answers, and then of its end."""
        threading.Thread(target=self._try, daemon=True, name="record-run").start()
        try:
            yield
        finally:
            self._over.set()
            if self.end is not None:
                with told_if_possible(log):
                    self._tell(self.end)

    def _try(self) -> None:
        with impatient(retries=0):
            while not self._is_recorded and not self._over.wait(_PERIOD_S):
                with contextlib.suppress(Exception):
                    self._tell(Running())

    def _tell(self, state: State[Any]) -> None:
        client = get_client(sync_client=True)
        with self._one:
            if self._is_recorded:
                client.set_flow_run_state(self.run.id, state, force=True)
            elif not self._over.is_set() or state.is_final():
                shown = self._flow.serialize_parameters(self._parameters)
                recorded = client.create_flow_run(self._flow, self.run.name, shown, state=state)
                # Tasks that begin from now on are of the recorded run.
                self.run.id, self.run.flow_id, self._is_recorded = recorded.id, recorded.flow_id, True
                EventsWorker.set_client_override(None)
