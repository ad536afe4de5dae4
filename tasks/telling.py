"""Prefect is told, never asked: what it cannot take in costs the study nothing."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def told_if_possible(log: logging.Logger) -> Iterator[None]:
    """Logs what goes wrong inside, and goes on: the study's folder has it all."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a server that is away, or full, is not the study's failure
        log.warning("Prefect was not told: %s: %s", type(error).__name__, error)
