"""Requests to Prefect that may fail. A study needs none of them, so a lost one must not cost it time.

the server answers      retried once, up to 10 s each
it is down              tried once, for 10 s at most: a refused connection fails at once
it accepts and hangs    tried once, for 0.5 s, and for 10 s every 30 s
"""

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from prefect import Flow, get_run_logger
from prefect.artifacts import create_link_artifact
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext, SettingsContext, get_settings_context
from prefect.events import Event
from prefect.events.clients import EventsClient, NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.filesystems import LocalFileSystem, NullFileSystem
from prefect.logging.handlers import APILogHandler
from prefect.results import ResultStore
from prefect.runtime import flow_run
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED,
    Settings,
    temporary_settings,
)
from prefect.states import Completed, Failed, Running, State

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, known_here, sent_document, sent_text
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult

# By default the client retries for a minute. One retry is enough for a server that is busy.
_RETRIES = 1
# A server that hangs delays each caller. Once it is known to hang, only some requests may wait that long.
_PATIENCE_S, _SHORT_PATIENCE_S, _SHORT_FOR_S = 10.0, 0.5, 30.0


class _Server:
    """The state of the server at the last request."""

    is_away = False
    patient_at = 0.0  # when a request last waited for the full time, by the monotonic clock
    is_said = False


@functools.cache
def _settings(retries: int, patience_s: float) -> Settings:
    # This process's settings with other limits. They are cached, because a copy takes 40 ms.
    return get_settings_context().settings.copy_with_update(
        {PREFECT_CLIENT_MAX_RETRIES: retries, PREFECT_API_REQUEST_TIMEOUT: patience_s}
    )


@contextlib.contextmanager
def impatient(retries: int, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Limits the retries of Prefect's client, and the seconds that each of its requests may wait."""
    with SettingsContext(profile=get_settings_context().profile, settings=_settings(retries, patience_s)):
        yield


@contextlib.contextmanager
def told_if_possible(log: logging.Logger) -> Iterator[None]:
    """Logs an error of its body and continues. The study's folder has all records.

    The module's table lists what a server costs that does not answer.
    """
    is_short = _Server.is_away and time.monotonic() < _Server.patient_at + _SHORT_FOR_S
    try:
        with impatient(0 if _Server.is_away else _RETRIES, _SHORT_PATIENCE_S if is_short else _PATIENCE_S):
            yield
        _Server.is_away = _Server.is_said = False
    except Exception as error:  # noqa: BLE001 - a server that is down, or full, is not the study's failure
        is_away = is_of_server(error)
        if not is_away:
            log.warning("Prefect has not recorded an update: %s: %s", type(error).__name__, error)
        elif not _Server.is_away:
            reason = f"{type(error).__name__}: {error}"
            say_once(log, f"Prefect's server does not answer ({reason}). The study's folder has all records.")
        _Server.is_away = is_away
        if not is_short:
            _Server.patient_at = time.monotonic()


def say_once(log: logging.Logger, sentence: str) -> None:
    """Logs that the server does not answer. Only the first time since its last answer is it a warning."""
    log.log(logging.DEBUG if _Server.is_said else logging.WARNING, "%s", sentence)
    _Server.is_said = True


@contextlib.contextmanager
def impatient_if_away() -> Iterator[None]:
    """Has Prefect's client try each request once, if the server is known to be away."""
    with impatient(retries=0) if _Server.is_away else contextlib.nullcontext():
        yield


def is_of_server(error: Exception) -> bool:
    """Returns whether an error means that the server is away. A proxy in front of it may also say so."""
    is_answer = isinstance(error, httpx.HTTPStatusError)
    return isinstance(error, httpx.TransportError) or (is_answer and error.response.is_server_error)


def said(result: TrialResult, metric: str) -> State:
    """Returns the state of a trial's task run, named after the trial's outcome."""
    if result.outcome is Outcome.COMPLETED:
        return Completed(message=f"{metric} {SEARCH_METRICS[metric].shown(result.metrics.get(metric))}")
    return Completed(name=result.outcome.value.replace("_", " ").capitalize(), message=result.reason)


def said_of_sizes(ends: Sequence[object]) -> State:
    completed = sum(isinstance(end, TrialResult) and end.outcome is Outcome.COMPLETED for end in ends)
    return Completed(message=f"{completed} of {len(ends)} sizes completed")


def name_run(name: str, log: logging.Logger) -> None:
    """Names a deployment's run after its study. Until it has begun, the server's two words are its name."""
    with told_if_possible(log):
        get_client(sync_client=True).update_flow_run(flow_run.id, name=name)


@contextlib.contextmanager
def also_in_prefect(log: logging.Logger) -> Iterator[None]:
    """Writes what a log tells people, without tracebacks, to the run's log in Prefect too. Call it within a flow."""
    told = _RunLog()
    log.addHandler(told)
    try:
        yield
    finally:
        log.removeHandler(told)


class _RunLog(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._run = get_run_logger()

    def emit(self, record: logging.LogRecord) -> None:
        self._run.log(record.levelno, "%s", record.getMessage())


# Removal of known secrets from all requests of this process to a Prefect server.


# Prefect's own values: ids, and words of its protocol.
_PROTOCOL = frozenset({"id", "key", "type", "sort", "event", "occurred", "timestamp", "kind", "operator"})
_ENDINGS = ("_id", "_key", "_type", ".id", "_time", "_version")
# People choose the names below these keys, so a name may show that its value is a secret.
_NAMED_BY_PEOPLE = ("parameters", "job_variables")


def keep_secrets_from_prefect() -> None:
    """Has Prefect's clients hide the secrets that this process knows when it sends a request."""
    for client in (PrefectHttpxAsyncClient, PrefectHttpxSyncClient):
        if "build_request" not in vars(client):
            client.build_request = _build_request(client.build_request)  # type: ignore[method-assign]
    if EventsClient.emit is not _emit:
        EventsClient.emit = _emit  # type: ignore[method-assign]


def _build_request(build: Any) -> Any:
    def build_request(client: Any, *arguments: Any, json: Any = None, **options: Any) -> Any:
        return build(client, *arguments, json=hidden(json, known_here()), **options)

    return build_request


_emit_as_it_is = EventsClient.emit


async def _emit(client: EventsClient, event: Event) -> None:
    shown = hidden(event.model_dump(mode="json"), known_here())
    await _emit_as_it_is(client, Event.model_validate(shown))


def hidden(value: Any, secrets: KnownSecrets, name: str = "") -> Any:
    """Returns a JSON value of a request to Prefect without its secrets. `name` is its key in the enclosing object."""
    if isinstance(value, dict):
        if name in _NAMED_BY_PEOPLE:
            return secrets.hide_in(sent_document(value, Path(str(value.get("model_dir") or "."))))
        return {inner_name: hidden(inner, secrets, inner_name) for inner_name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden(inner, secrets, name) for inner in value]
    if not isinstance(value, str) or name in _PROTOCOL or name.endswith(_ENDINGS):
        return value
    if value.startswith(("[", "{")):
        # The rows of a table are JSON as text.
        try:
            return json.dumps(secrets.hide_in(json.loads(value)))
        except ValueError:
            pass
    return secrets.hide(sent_text(value))


def in_words(ways: Sequence[str]) -> str:
    *commands, place = ways
    # Prefect's pages show `&amp;` for each & of an address without a text of its own.
    shown = f"[{place.partition('?')[0]}]({place})" if place.startswith("http") else place
    return ", then ".join([*(f"`{command}`" for command in commands), shown])


def link_to_mlflow(ways: Sequence[str], key: str, text: str) -> None:
    """Creates a link artifact, unless a command has to be typed first: the link would lead nowhere."""
    if len(ways) == 1 and ways[0].startswith("http"):
        create_link_artifact(ways[0], key=key, link_text=text)


# Prefect's own record of a flow run. It must be complete before the command stops its server.

_HISTORY_S = 10.0
_POLL_S = 0.2
_PAGE = 200  # Prefect's most task runs in one answer


def wait_for_history(flow_run_name: str) -> bool:
    """Waits until the server has recorded the end of every task run. Their states arrive a little late.

    Only the newest run of that name counts: an earlier one may have been killed, and its task runs never end.
    Returns False if the server does not answer, or needs longer than `_HISTORY_S`.
    """
    with contextlib.suppress(httpx.HTTPError), impatient(retries=1), impatient_if_away():
        return _wait_for_history(flow_run_name)
    return False


def _wait_for_history(flow_run_name: str) -> bool:
    # Later lines would not reach the server.
    APILogHandler().flush()
    deadline = time.monotonic() + _HISTORY_S
    named = FlowRunFilter(name=FlowRunFilterName(any_=[flow_run_name]))
    seen = -1
    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(flow_run_filter=named, sort=FlowRunSort.START_TIME_DESC, limit=1)
        if not newest:
            return True
        only = FlowRunFilter(id=FlowRunFilterId(any_=[run.id for run in newest]))
        while time.monotonic() < deadline:
            runs = []
            while len(runs) % _PAGE == 0:
                page = client.read_task_runs(flow_run_filter=only, limit=_PAGE, offset=len(runs))
                runs += page
                if not page:
                    break
            if len(runs) == seen and all(run.state is not None and run.state.is_final() for run in runs):
                return True
            seen = len(runs)
            time.sleep(_POLL_S)
    return False


# The run of a flow that its silent server did not take. It runs without one, which gets it when it is back.

_PERIOD_S = 5.0


def run_unrecorded(flow: Flow[..., Any], parameters: dict[str, Any], log: logging.Logger, reason: str) -> None:
    _Server.is_away, _Server.patient_at = True, time.monotonic()
    say_once(log, f"Prefect's server did not take this run ({reason}). It goes on, and its folder has all records.")
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
    """The run, which is the server's as soon as it answers."""

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
