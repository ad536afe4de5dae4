"""The progress of a Core API program, and its record."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.training.records import Recorder
from trial_lib.training.saved.checkpoints import CheckpointStore
from trial_lib.wire.whole_files import write_whole


class CoreProgress:
    """The metrics, checkpoints and end of one training. Every rank keeps them, and rank 0 records them.

    Args:
        recorder: appends to the full experiment's metrics. In a trial and without ZeroTune it appends to nothing.
        store: the full experiment's checkpoints, as one rank alone sees them; None if it keeps none.
        metric: the validation metric that decides which checkpoint is best.

    Attributes:
        batch: the optimizer steps done, as far as the program has reported.
        epoch: from 0, if the program reports its progress in epochs.
        is_completed: whether the program has reported its operation complete.
    """

    def __init__(self, recorder: Recorder, store: CheckpointStore | None, metric: str) -> None:
        self.batch = 0
        self.epoch = 0
        self.is_completed = False
        self._recorder = recorder
        self._store = store
        self._metric = metric
        self._validation: tuple[int, dict[str, float]] = (-1, {})
        self._left_out: set[str] = set()

    def training(self, batch: int, metrics: Mapping[str, Any]) -> None:
        """Records training metrics."""
        self.batch = max(self.batch, batch)
        self._recorder.training(batch, self.epoch, self._numbers(metrics))

    def validation(self, batch: int, metrics: Mapping[str, Any]) -> None:
        """Records validation metrics. They also judge a checkpoint of the same batch, whichever came first."""
        self.batch = max(self.batch, batch)
        numbers = self._numbers(metrics)
        self._validation = batch, numbers
        self._recorder.validation(batch, self.epoch, numbers)
        if self._store is not None and self._metric in numbers:
            self._store.judge(batch, numbers[self._metric])

    def metric_at(self, batch: int) -> float | None:
        """Returns the metric of the last validation, if that was at this batch."""
        validated_at, metrics = self._validation
        return metrics.get(self._metric) if validated_at == batch else None

    def checkpoint(self, batch: int, name: str) -> None:
        """Records a complete checkpoint."""
        self.batch = max(self.batch, batch)
        self._recorder.checkpoint(batch, name, self.metric_at(batch))

    def completed(self, metric: Any) -> None:
        """Notes the end of the operation.

        Args:
            metric: the program's result. It counts if no validation was reported.
        """
        self.is_completed = True
        number = _number(metric)
        if self._validation[0] < 0 and number is not None:
            self._validation = self.batch, {self._metric: number}

    def write_end(self, path: Path) -> None:
        """Records the end of the training; on rank 0."""
        checkpoints = [] if self._store is None else self._store.complete()
        best = None if self._store is None else self._store.best()
        end = {
            "batches": self.batch or None,
            "latest_checkpoint": checkpoints[-1].name if checkpoints else None,
            "best_checkpoint": best and best.name,
            "best_metric": best and best.metric,
            "metrics": self._validation[1],
        }
        write_whole(path, json.dumps(end, indent=2))

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Returns the metrics that are one number each, and names the others once."""
        numbers = {str(name): number for name, value in metrics.items() if (number := _number(value)) is not None}
        others = {str(name) for name in metrics} - set(numbers) - self._left_out
        if others:
            self._left_out |= others
            self._recorder.note(f"metrics that are not one number are left out: {', '.join(sorted(others))}")
        return numbers


def _number(value: Any) -> float | None:
    """Returns a number, or an array or tensor of one element, as a float; None for anything else."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
