"""The records of a running training: one JSON object a line. Rank 0 appends them and the driver reads them.

    {"kind": "training", "batch": 100, "epoch": 0, "time": 1763750000.0, "metrics": {"loss": 1.2, "throughput": 95.1}}
    {"kind": "validation", "batch": 100, "epoch": 0, "time": ..., "metrics": {"validation_loss": 1.3}}
    {"kind": "checkpoint", "batch": 100, "time": ..., "name": "batch-00000100", "metric": 1.3}
    {"kind": "note", "time": ..., "text": "a note for the user"}

`batch` counts the finished optimizer steps. A training that went back to a checkpoint appends its batches again.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.messages.files import append


class Recorder:
    """Appends to the file of records on rank 0, and prints each record. Without a file it does nothing."""

    def __init__(self, path: Path | None, is_writer: bool) -> None:
        self._path = path
        self._is_writer = is_writer

    def training(self, batch: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self._append({"kind": "training", "batch": batch, "epoch": epoch, "metrics": dict(metrics)})

    def validation(self, batch: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self._append({"kind": "validation", "batch": batch, "epoch": epoch, "metrics": dict(metrics)})

    def checkpoint(self, batch: int, name: str, metric: float | None) -> None:
        self._append({"kind": "checkpoint", "batch": batch, "name": name, "metric": metric})

    def note(self, text: str) -> None:
        self._append({"kind": "note", "text": text})

    def _append(self, record: dict[str, Any]) -> None:
        if not self._is_writer or self._path is None:
            return
        line = json.dumps({**record, "time": time.time()})
        print(_for_people(record), flush=True)
        append(self._path, line)


def _for_people(record: dict[str, Any]) -> str:
    kind = record["kind"]
    if kind == "note":
        return f"note: {record['text']}"
    if kind == "checkpoint":
        return f"batch {record['batch']}: checkpoint {record['name']}"
    metrics = " ".join(f"{name} {value:.6g}" for name, value in record["metrics"].items())
    return f"batch {record['batch']}: {kind} {metrics}"
