"""The Core API's checkpoints: complete or absent in a full experiment, a scratch folder in a trial."""

import json
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from trial_lib.training.checkpoints import CheckpointStore, write_end
from trial_lib.training.distributed import DistributedContext
from trial_lib.training.records import Recorder

# The progress of a Core API program, and its record.


class CoreProgress:
    """The metrics, checkpoints and end of one training. Every rank keeps them, and rank 0 records them.

    `store` is the full experiment's, as one rank alone sees it; None if nothing is kept.
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
        self.batch = max(self.batch, batch)
        self._recorder.training(batch, self.epoch, self._numbers(metrics))

    def validation(self, batch: int, metrics: Mapping[str, Any]) -> None:
        """Also judges a checkpoint of the same batch, whichever came first."""
        self.batch = max(self.batch, batch)
        numbers = self._numbers(metrics)
        self._validation = batch, numbers
        self._recorder.validation(batch, self.epoch, numbers)
        if self._store is not None and self._metric in numbers:
            self._store.judge(batch, numbers[self._metric])

    def metric_at(self, batch: int) -> float | None:
        """The metric of the last validation, if that was at this batch."""
        validated_at, metrics = self._validation
        return metrics.get(self._metric) if validated_at == batch else None

    def checkpoint(self, batch: int, name: str) -> None:
        self.batch = max(self.batch, batch)
        self._recorder.checkpoint(batch, name, self.metric_at(batch))

    def completed(self, metric: Any) -> None:
        """Notes the end of the operation. The program's result counts if no validation was reported."""
        self.is_completed = True
        number = _number(metric)
        if self._validation[0] < 0 and number is not None:
            self._validation = self.batch, {self._metric: number}

    def write_end(self, path: Path) -> None:
        write_end(path, self._store, self.batch or None, self._validation[1])

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        numbers = {str(name): number for name, value in metrics.items() if (number := _number(value)) is not None}
        others = {str(name) for name in metrics} - set(numbers) - self._left_out
        if others:
            self._left_out |= others
            self._recorder.note(f"metrics that are not one number are left out: {', '.join(sorted(others))}")
        return numbers


def _number(value: Any) -> float | None:
    # A number, or an array or tensor of one element, as a float; None for anything else.
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


METADATA = "metadata.json"
"""The file of a checkpoint that holds its metadata."""

Selector = Callable[[str], bool]
"""Returns whether a file is selected, by its path relative to the folder."""


class CheckpointContext(ABC):
    """Stores and restores checkpoints by storage ids."""

    def __init__(self, distributed: DistributedContext) -> None:
        self._distributed = distributed

    def store_path(
        self, metadata: dict[str, Any] | None = None, *, shard: bool = False
    ) -> AbstractContextManager[tuple[Path, str]]:
        """Stores the files that its body writes as a checkpoint. It yields the folder to write to, and the storage id.

        Args:
            metadata: JSON. In a full experiment it has `steps_completed`, the optimizer steps done.
            shard: whether all ranks write to the one folder. Then all of them enter and leave. Otherwise rank 0 alone.

        Raises:
            RuntimeError: another rank than 0 stores without `shard`.
            ValueError: the metadata has no `steps_completed`, in a full experiment.
        """
        if not shard and self._distributed.rank != 0:
            raise RuntimeError(
                f"Rank {self._distributed.rank} has called checkpoint.store_path without shard=True: rank 0 alone may."
            )
        return self._storing(self._merged(metadata or {}, shard), shard)

    @contextmanager
    def restore_path(self, storage_id: str, *_: Any, **__: Any) -> Iterator[Path]:
        """Yields the folder of a checkpoint. Read it, and leave it unchanged.

        The id is from `store_path`, or `get_cluster_info().latest_checkpoint`. Determined's further arguments are about
        downloads. Nothing is downloaded here, so they have no effect.

        Raises:
            FileNotFoundError: there is no such checkpoint.
        """
        yield self._existing(storage_id)

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: dict[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Stores a copy of a folder as a checkpoint. Returns its storage id.

        Args:
            ckpt_dir: the folder; None for a rank that has none.
            metadata: as for `store_path`.
            shard: as for `store_path`. Folders of several ranks are merged.
            selector: the files to copy; all for None.
        """
        with self.store_path(metadata, shard=shard) as (path, storage_id):
            folder = None if ckpt_dir is None else Path(ckpt_dir)
            before = self._distributed.allgather(_place(folder))[: self._distributed.rank] if shard else []
            if folder is not None and _place(folder) not in before:
                _copy(folder, path, selector)
        return storage_id

    def download(
        self, storage_id: str, ckpt_dir: str | os.PathLike[str], *_: Any, selector: Selector | None = None
    ) -> None:
        """Copies a checkpoint, or its selected files, into a folder, which is made if needed.

        Call it on all ranks. The first rank of each node copies.
        """
        if self._distributed.local_rank == 0:
            _copy(self._existing(storage_id), Path(ckpt_dir), selector)
        self._distributed.barrier()

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        metadata: dict[str, Any] = json.loads((self._existing(storage_id) / METADATA).read_text(encoding="utf-8"))
        return metadata

    @abstractmethod
    def _storing(self, metadata: dict[str, Any], shard: bool) -> AbstractContextManager[tuple[Path, str]]:
        """`store_path` with the ranks' metadata merged."""

    @abstractmethod
    def _folder(self, storage_id: str) -> Path:
        """It need not exist."""

    def _existing(self, storage_id: str) -> Path:
        folder = self._folder(str(storage_id))
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no checkpoint {storage_id} in {folder.parent}.")
        return folder

    def _merged(self, metadata: dict[str, Any], shard: bool) -> dict[str, Any]:
        # The metadata of all ranks. If two differ, that of the lower rank counts.
        merged: dict[str, Any] = {}
        for one in reversed(self._distributed.allgather(metadata) if shard else [metadata]):
            merged |= one
        return merged


class KeptCheckpoints(CheckpointContext):
    """The checkpoints of a full experiment. It keeps the best and the last two, each complete or absent.

    All ranks together write through `store`, and rank 0 alone through `store_of_one`.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        store: CheckpointStore,
        store_of_one: CheckpointStore,
        progress: CoreProgress,
    ) -> None:
        super().__init__(distributed)
        self._store = store
        self._store_of_one = store_of_one
        self._progress = progress

    @contextmanager
    def _storing(self, metadata: dict[str, Any], shard: bool) -> Iterator[tuple[Path, str]]:
        if not isinstance(metadata.get("steps_completed"), int):
            raise ValueError(
                "A checkpoint of a full experiment is known by its optimizer steps: pass "
                'metadata={"steps_completed": N} to checkpoint.store_path.'
            )
        batch = metadata["steps_completed"]
        store = self._store if shard else self._store_of_one
        with store.saving(batch, self._progress.metric_at(batch), metadata) as (checkpoint, folder):
            yield folder, checkpoint.name
            if self._distributed.rank == 0:
                (folder / METADATA).write_text(json.dumps(metadata, indent=2), encoding="utf-8")
        self._progress.checkpoint(batch, checkpoint.name)

    def _folder(self, storage_id: str) -> Path:
        return self._store.root / storage_id


class LooseCheckpoints(CheckpointContext):
    """Checkpoints that ZeroTune does not keep: those of a trial, and those of a run without ZeroTune."""

    def __init__(self, distributed: DistributedContext, root: Path) -> None:
        super().__init__(distributed)
        self._root = root.absolute()

    @contextmanager
    def _storing(self, metadata: dict[str, Any], shard: bool) -> Iterator[tuple[Path, str]]:
        storage_id = str(uuid.uuid4())
        if shard:
            storage_id = self._distributed.broadcast(storage_id)
        folder = self._folder(storage_id)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder, storage_id
        if self._distributed.rank == 0:
            (folder / METADATA).write_text(json.dumps(metadata, indent=2), encoding="utf-8")
        if shard:
            self._distributed.barrier()

    def _folder(self, storage_id: str) -> Path:
        return self._root / storage_id


def _place(folder: Path | None) -> tuple[int, int] | None:
    if folder is None:
        return None
    status = folder.stat()
    return status.st_dev, status.st_ino


def _copy(source: Path, target: Path, selector: Selector | None) -> None:
    for parent, _, names in os.walk(source):
        for name in names:
            path = Path(parent, name)
            relative = path.relative_to(source)
            if selector is None or selector(relative.as_posix()):
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target / relative)
