"""Prefect is told, never asked: what it cannot take in costs the study nothing."""

import contextlib
import functools
import logging
from collections.abc import Iterator

import httpx
from prefect.context import SettingsContext, get_settings_context
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, Settings

# Left to itself the client asks a server that is away for a minute, each time. Once more is for one that is busy.
_RETRIES = 1


class _Server:
    """What the last attempt to tell it something has shown.

    Attributes:
        is_away: whether it did not answer.
    """

    is_away = False


@functools.cache
def _settings(retries: int) -> Settings:
    """Returns this process's settings but for that: making them takes 40 ms, which no trial is to pay."""
    return get_settings_context().settings.copy_with_update({PREFECT_CLIENT_MAX_RETRIES: retries})


@contextlib.contextmanager
def impatient(retries: int) -> Iterator[None]:
    """Has Prefect's client ask a server that does not answer no more than so many times again."""
    with SettingsContext(profile=get_settings_context().profile, settings=_settings(retries)):
        yield


@contextlib.contextmanager
def told_if_possible(log: logging.Logger) -> Iterator[None]:
    """Logs what goes wrong inside, and goes on: the study's folder has it all.

    A server that is away costs some two seconds the first time, and nothing until it answers again.
    """
    retries = 0 if _Server.is_away else _RETRIES
    try:
        with impatient(retries):
            yield
        _Server.is_away = False
    except Exception as error:  # noqa: BLE001 - a server that is away, or full, is not the study's failure
        is_away = isinstance(error, httpx.TransportError)
        if not (is_away and _Server.is_away):
            log.warning("Prefect was not told: %s: %s", type(error).__name__, error)
        _Server.is_away = is_away
