"""Requests to Prefect that may fail. A study needs none of them, so a lost one must not cost it time.

the server answers      retried once, up to 10 s each
it is down              tried once, for 10 s at most: a refused connection fails at once
it accepts and hangs    tried once, for 0.5 s, and for 10 s every 30 s
"""

import contextlib
import functools
import logging
import time
from collections.abc import Iterator

import httpx
from prefect.context import SettingsContext, get_settings_context
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, Settings

# By default the client retries for a minute. One retry is enough for a server that is busy.
_RETRIES = 1
# A server that hangs delays each caller. Once it is known to hang, only some requests may wait that long.
_PATIENCE_S, _SHORT_PATIENCE_S, _SHORT_FOR_S = 10.0, 0.5, 30.0


class _Server:
    """The state of the server at the last request.

    Attributes:
        is_away: whether it did not answer.
        patient_at: when a request last waited for the full time, in seconds of the monotonic clock.
        is_said: whether a warning has been logged since it last answered.
    """

    is_away = False
    patient_at = 0.0
    is_said = False


@functools.cache
def _settings(retries: int, patience_s: float) -> Settings:
    """Returns this process's settings with other limits. They are cached, because a copy takes 40 ms."""
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


def say_away(log: logging.Logger, sentence: str) -> None:
    """Logs that the server does not answer, as it is known from now on."""
    _Server.is_away, _Server.patient_at = True, time.monotonic()
    say_once(log, sentence)


@contextlib.contextmanager
def impatient_if_away() -> Iterator[None]:
    """Has Prefect's client try each request once, if the server is known to be away."""
    with impatient(retries=0) if _Server.is_away else contextlib.nullcontext():
        yield


def is_of_server(error: Exception) -> bool:
    """Returns whether an error means that the server is away. A proxy in front of it may also say so."""
    is_answer = isinstance(error, httpx.HTTPStatusError)
    return isinstance(error, httpx.TransportError) or (is_answer and error.response.is_server_error)
