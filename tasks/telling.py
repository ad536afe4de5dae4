"""Prefect is told, never asked: what it cannot take in costs the study nothing."""

import contextlib
import functools
import logging
import time
from collections.abc import Iterator

import httpx
from prefect.context import SettingsContext, get_settings_context
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, Settings

# Left to itself the client asks a server that is away for a minute, each time. Once more is for one that is busy.
_RETRIES = 1
# One that hangs holds up whoever tells it something; once it is known to be away, only now and then for as long.
_PATIENCE_S, _SHORT_PATIENCE_S, _SHORT_FOR_S = 10.0, 0.5, 30.0


class _Server:
    """What the last attempt to tell it something has shown.

    Attributes:
        is_away: whether it did not answer.
        patient_at: when it was last given its time to answer.
        is_said: whether people have been told since it last answered.
    """

    is_away = False
    patient_at = 0.0
    is_said = False


@functools.cache
def _settings(retries: int, patience_s: float) -> Settings:
    """Returns this process's settings but for that: making them takes 40 ms, which no trial is to pay."""
    return get_settings_context().settings.copy_with_update(
        {PREFECT_CLIENT_MAX_RETRIES: retries, PREFECT_API_REQUEST_TIMEOUT: patience_s}
    )


@contextlib.contextmanager
def impatient(retries: int, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Has Prefect's client ask a server that does not answer no more than so many times again, each for so long."""
    with SettingsContext(profile=get_settings_context().profile, settings=_settings(retries, patience_s)):
        yield


@contextlib.contextmanager
def told_if_possible(log: logging.Logger) -> Iterator[None]:
    """Logs what goes wrong inside, and goes on: the study's folder has it all.

    A server that is away costs some two seconds the first time, and nothing until it answers again. One that is there
    and hangs costs twice ten, then half a second, and ten again every half minute.
    """
    is_short = _Server.is_away and time.monotonic() < _Server.patient_at + _SHORT_FOR_S
    try:
        with impatient(0 if _Server.is_away else _RETRIES, _SHORT_PATIENCE_S if is_short else _PATIENCE_S):
            yield
        _Server.is_away = _Server.is_said = False
    except Exception as error:  # noqa: BLE001 - a server that is away, or full, is not the study's failure
        is_away = is_of_server(error)
        if not is_away:
            log.warning("Prefect was not told: %s: %s", type(error).__name__, error)
        elif not _Server.is_away:
            reason = f"{type(error).__name__}: {error}"
            say_once(log, f"Prefect was not told: its server does not answer ({reason}). The folder has it all.")
        _Server.is_away = is_away
        if not is_short:
            _Server.patient_at = time.monotonic()


def say_once(log: logging.Logger, sentence: str) -> None:
    """Tells people that the server is away, unless that has been done since it last answered; the file has it all."""
    log.log(logging.DEBUG if _Server.is_said else logging.WARNING, "%s", sentence)
    _Server.is_said = True


@contextlib.contextmanager
def impatient_if_away() -> Iterator[None]:
    """Where the server is known to be away, has Prefect's client ask it once, whatever it is asked."""
    with impatient(retries=0) if _Server.is_away else contextlib.nullcontext():
        yield


def is_of_server(error: Exception) -> bool:
    """Returns whether a server is away: it does not answer, or what stands before it says so."""
    is_answer = isinstance(error, httpx.HTTPStatusError)
    return isinstance(error, httpx.TransportError) or (is_answer and error.response.is_server_error)
