"""Reads the records and the log of a rank."""

import contextlib
import json
from pathlib import Path
from typing import Any

from trial_lib.launch.classify import RankRecord

_TAIL_BYTES = 20_000


def read_rank_record(
    record: Path, failure: Path, log: Path, log_start: int = 0, engine_built: Path | None = None
) -> RankRecord:
    """Returns the records of a rank. A record that is missing or damaged is None.

    Args:
        record: the file with its measurement, or with the record of its program's return.
        failure: the file with the exception that ended it.
        log: the file with its output.
        log_start: the bytes of the log that are older than the rank.
        engine_built: the file that exists when the rank has an engine. None if the caller does not ask.
    """
    has_engine = engine_built is None or engine_built.exists()
    return RankRecord(_read(record), _read(failure), _tail(log, log_start), str(log), has_engine)


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, json.JSONDecodeError):
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    return None


def _tail(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""
