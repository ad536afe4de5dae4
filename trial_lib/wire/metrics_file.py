"""The file of a training's metrics: JSON lines that one process appends and others read.

`trial_lib.training.records` documents the lines. A reader gets every whole line once. A training that went back to a
checkpoint appends its batches again. The reader skips lines of a batch that it has read before.
"""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trial_lib.wire.json_lines import Line, LineReader

TRAINING, VALIDATION, CHECKPOINT, NOTE, SYSTEM = "training", "validation", "checkpoint", "note", "system"

# Kinds with one line for each batch.
_ONCE_A_BATCH = (TRAINING, VALIDATION, CHECKPOINT)


@dataclass(frozen=True)
class MetricsRecord:
    """One line.

    Attributes:
        kind: `training`, `validation`, `checkpoint`, `note` or `system`.
        end: bytes of the file up to the end of this line.
        batch: optimizer steps done.
        epoch: from 0; None if the line has none.
        time: seconds since the epoch.
        metrics: by name.
        name: of a checkpoint.
        metric: the validation metric that decides which checkpoint is best; None for a checkpoint without one.
        text: of a note.
    """

    kind: str
    end: int
    batch: int = 0
    epoch: int | None = None
    time: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    name: str = ""
    metric: float | None = None
    text: str = ""

    def __str__(self) -> str:
        """Returns the line in a form that a person reads."""
        if self.kind == NOTE:
            return f"note: {self.text}"
        if self.kind == CHECKPOINT:
            return f"batch {self.batch}: checkpoint {self.name}"
        values = " ".join(f"{name} {value:.5g}" for name, value in self.metrics.items())
        return f"batch {self.batch}: {self.kind} {values}"


class MetricsReader:
    """Reads a metrics file as it grows.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._lines = LineReader(path)
        self._latest: dict[str, int] = {}  # kind -> the largest batch read

    def read(self) -> list[MetricsRecord]:
        """Returns the records since the last call. A line that is not whole yet comes later."""
        records = (_record(line) for line in self._lines.read())
        return [record for record in records if record is not None and self._is_news(record)]

    def _is_news(self, record: MetricsRecord) -> bool:
        if record.kind not in _ONCE_A_BATCH:
            return True
        if record.batch <= self._latest.get(record.kind, -1):
            return False
        self._latest[record.kind] = record.batch
        return True


def _record(line: Line) -> MetricsRecord | None:
    """Returns the record of a line; None for a line that a killed process has damaged."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        data: dict[str, Any] = json.loads(line.content)
        metric, epoch = data.get("metric"), data.get("epoch")
        return MetricsRecord(
            kind=str(data["kind"]),
            end=line.end,
            batch=int(data.get("batch", 0)),
            epoch=None if epoch is None else int(epoch),
            time=float(data.get("time", 0.0)),
            metrics={name: float(value) for name, value in data.get("metrics", {}).items() if _is_number(value)},
            name=str(data.get("name", "")),
            metric=None if metric is None else float(metric),
            text=str(data.get("text", "")),
        )
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
