"""Reading what a rank has left behind."""

import contextlib
import json
from pathlib import Path
from typing import Any

from trial_lib.launch.classify import RankRecord

_TAIL_BYTES = 20_000


def read_rank_record(
    record: Path, failure: Path, log: Path, log_start: int = 0, engine_built: Path | None = None
) -> RankRecord:
    """Returns what a rank has left; what is missing or torn is None.

    Args:
        record: its measurement, or the record of its program's return.
        failure: the exception that ended it.
        log: what it printed.
        log_start: bytes of the log that were there before.
        engine_built: the file that is there once it has an engine; None where nobody asks.
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
