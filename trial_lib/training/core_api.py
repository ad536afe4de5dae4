"""The Core API for a user's own training loop, under Determined's names.

The same program is a trial that is measured, a full experiment, or a run without ZeroTune. `init` finds out which.

| | trial | full experiment | without ZeroTune |
|---|---|---|---|
| `op.length` | longer than any trial | `searcher.max_length` | 1 |
| metrics | taken, not kept | to the record and MLflow | taken, not kept |
| checkpoints | in a scratch folder | the best and the last two, complete or absent | in `checkpoints`, all |
| `should_preempt` | False | whether a user stops it | False |
"""

import enum
import json
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from zerotune.trial_lib.messages.folders import StopRequest
from zerotune.trial_lib.messages.orders import TrainingSpec, training_spec_of_this_rank
from zerotune.trial_lib.training.checkpoints import CheckpointStore, write_end
from zerotune.trial_lib.training.context import AttrDict
from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError
from zerotune.trial_lib.training.metrics import Recorder

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


_DEFAULT_METRIC = "validation_loss"


class PreemptMode(enum.Enum):
    """The ranks that call `should_preempt`.

    `WorkersAskChief`: all of them, in step. All get rank 0's answer. `ChiefOnly`: rank 0 alone. `WorkersAskMaster`: any
    rank at any time. Their answers may differ for a moment.
    """

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"
    WorkersAskMaster = "WORKERS_ASK_MASTER"


class SearcherOperation:
    """One request to train up to `length`, in the unit of `searcher.max_length`, and then to report."""

    def __init__(self, length: int, unit: str | None, distributed: DistributedContext, progress: CoreProgress) -> None:
        self.length = length
        self._unit = unit
        self._distributed = distributed
        self._progress = progress

    def report_progress(self, length: float) -> None:
        """Reports the progress of the training, in the unit of `length`; on rank 0."""
        self._must_be_chief("report_progress")
        if self._unit == "batches":
            self._progress.batch = max(self._progress.batch, int(length))
        elif self._unit == "epochs":
            self._progress.epoch = int(length)

    def report_completed(self, searcher_metric: Any) -> None:
        """Ends the operation with its result, usually the validation metric of `searcher.metric`; once, on rank 0."""
        self._must_be_chief("report_completed")
        if self._progress.is_completed:
            raise RuntimeError("op.report_completed was called twice: once for each operation.")
        self._progress.completed(searcher_metric)

    def _must_be_chief(self, what: str) -> None:
        if self._distributed.rank != 0:
            raise RuntimeError(f"Rank {self._distributed.rank} has called op.{what}: rank 0 alone may.")


class SearcherContext:
    """The length of the training, and the name of the validation metric that decides which checkpoint is best."""

    def __init__(self, spec: TrainingSpec | None, distributed: DistributedContext, progress: CoreProgress) -> None:
        self.metric = _DEFAULT_METRIC if spec is None else spec.metric
        self._length, self._unit = _length(spec)
        self._distributed = distributed
        self._progress = progress

    @property
    def has_length(self) -> bool:
        return self._length is not None

    def operations(self, *_: Any, **__: Any) -> Iterator[SearcherOperation]:
        """Yields the one operation. Determined's arguments have no effect.

        Raises:
            InvalidTrialError: the experiment names no length.
        """
        if self._length is None:
            raise InvalidTrialError(
                "The program asks for its length (core_context.searcher.operations), and the experiment names none: "
                "add `searcher: {max_length: {batches: 1000}}` to the YAML, or so many epochs or records. (A command "
                "that was typed has its YAML in the study's folder: experiment.yaml, for zerotune train.)"
            )
        yield SearcherOperation(self._length, self._unit, self._distributed, self._progress)

    def get_configured_units(self) -> str | None:
        """The unit of `op.length`: `batches`, `records`, `epochs`, or None if there is none."""
        return self._unit


class TrainContext:
    """Reports metrics. Those of rank 0 count."""

    def __init__(self, progress: CoreProgress, tensorboard: Path) -> None:
        self._progress = progress
        self._tensorboard = tensorboard

    def report_training_metrics(
        self, steps_completed: int, metrics: Mapping[str, Any], batch_metrics: list[dict[str, Any]] | None = None
    ) -> None:
        """Reports training metrics, one number each by name, after `steps_completed` optimizer steps.

        `batch_metrics`, those of each batch, are for Determined and not kept.
        """
        self._progress.training(steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Reports validation metrics. The one that `searcher.metric` names decides which checkpoint is best."""
        self._progress.validation(steps_completed, metrics)

    def get_tensorboard_path(self) -> Path:
        """The folder for TensorBoard's files."""
        self._tensorboard.mkdir(parents=True, exist_ok=True)
        return self._tensorboard


class PreemptContext:
    """Requests to save and stop."""

    def __init__(self, request: StopRequest | None, distributed: DistributedContext, mode: PreemptMode) -> None:
        self.was_told = False
        self._request = request
        self._distributed = distributed
        self._mode = mode
        self._heeds = False

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Whether to save a checkpoint and return, because a user stops the full experiment to resume it later.

        A full experiment that calls this gets some seconds to save when it is stopped (Ctrl-C). Another does not.
        `auto_ack` is for Determined's cluster and has no effect.

        Raises:
            RuntimeError: another rank than 0 asks in the mode `ChiefOnly`.
        """
        is_chief = self._distributed.rank == 0
        if self._mode is PreemptMode.ChiefOnly and not is_chief:
            raise RuntimeError(f"Rank {self._distributed.rank} has called should_preempt in the mode ChiefOnly.")
        if self._request is None:
            return False
        if not self._heeds:
            self._heeds = True
            self._request.heed()
        told = self._request.is_made
        if self._mode is PreemptMode.WorkersAskChief:
            told = self._distributed.broadcast(told)
        self.was_told = self.was_told or told
        return told


class Context:
    """The Core API of one rank. `init` makes it, and `with` enters it.

    Attributes:
        distributed: this rank's place, and the exchange of Python objects between ranks.
        searcher: the length of the training.
        train: reports metrics.
        checkpoint: stores and restores checkpoints.
        preempt: requests to save and stop.
    """

    def __init__(
        self,
        spec: TrainingSpec | None,
        distributed: DistributedContext,
        checkpoint_storage: Path,
        preempt_mode: PreemptMode,
    ) -> None:
        self.distributed = distributed
        self._spec = spec
        is_chief = distributed.rank == 0
        metrics = checkpoints = stop = tensorboard = None
        if spec is not None:
            metrics, checkpoints, stop, tensorboard = (
                None if path is None else Path(path)
                for path in (spec.metrics, spec.checkpoints, spec.stop, spec.tensorboard)
            )
        smaller_is_better = spec is None or spec.smaller_is_better
        alone = None if checkpoints is None else CheckpointStore(checkpoints, DistributedContext(), smaller_is_better)
        progress = CoreProgress(
            Recorder(metrics, is_writer=is_chief),
            alone if is_chief else None,
            _DEFAULT_METRIC if spec is None else spec.metric,
        )
        self._progress = progress
        self._request = None if stop is None else StopRequest(stop)
        self.searcher = SearcherContext(spec, distributed, progress)
        self.train = TrainContext(progress, tensorboard or Path("tensorboard"))
        self.preempt = PreemptContext(self._request, distributed, preempt_mode)
        self.checkpoint: CheckpointContext
        if checkpoints is None or alone is None:
            self.checkpoint = LooseCheckpoints(distributed, checkpoint_storage)
        else:
            together = CheckpointStore(checkpoints, distributed, smaller_is_better)
            self.checkpoint = KeptCheckpoints(distributed, together, alone, progress)

    def __enter__(self) -> "Context":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Records the end of the training, if it has ended well; on rank 0."""
        if kind is not None or self._spec is None or self.distributed.rank != 0:
            return
        if self._request is not None and self.preempt.was_told and not self._progress.is_completed:
            self._request.follow()
        elif self._spec.finished is not None:
            self._progress.write_end(Path(self._spec.finished))


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | Path | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
) -> Context:
    """The Core API of this rank, a context manager to train in.

    Args:
        distributed: the ranks. Default: those of the launcher's environment.
        checkpoint_storage: the folder of the checkpoints in a run without ZeroTune. Default: `checkpoints`.
        preempt_mode: the ranks that will call `preempt.should_preempt`.
    """
    spec = training_spec_of_this_rank()
    scratch = None if spec is None else spec.scratch
    storage = checkpoint_storage if scratch is None else Path(scratch) / "checkpoints"
    return Context(
        spec,
        DistributedContext.from_torch() if distributed is None else distributed,
        Path(storage or "checkpoints"),
        PreemptMode(preempt_mode),
    )


def _length(spec: TrainingSpec | None) -> tuple[int | None, str | None]:
    if spec is None:
        return 1, None
    if spec.is_trial:
        # Longer than any trial: the largest 32-bit number, because some code makes a tensor of a length.
        return 2**31 - 1, None
    if spec.length is None:
        return None, None
    ((unit, length),) = spec.length.items()
    return length, unit


# The training that a script is a rank of: Determined's `get_cluster_info`.

LOG_FORMAT = "%(asctime)s %(levelname)s [%(process)s] %(name)s: %(message)s"
"""For `logging.basicConfig(format=...)`. The process number distinguishes the ranks."""


@dataclass(frozen=True)
class TrialInfo:
    """One training."""

    # The experiment's hyperparameters with the DeepSpeed configuration of this training instead of the user's.
    # `deepspeed_config` names its file. `overwrite_deepspeed_args` holds all of it, for code that merges it into a file
    # of its own. They have keys and attributes.
    hparams: AttrDict
    trial_seed: int  # the experiment's seed
    _config: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class ClusterInfo:
    """ZeroTune's information for this rank."""

    trial: TrialInfo  # the training
    # The newest intact checkpoint of an earlier start, for `checkpoint.restore_path`; None if the training begins
    latest_checkpoint: str | None
    task_type: str = "TRIAL"  # `TRIAL`, always: a trial that is measured, or a full experiment

    @property
    def user_data(self) -> dict[str, Any]:
        """The YAML's `data` section."""
        data: dict[str, Any] = self.trial._config.get("data") or {}
        return data


def get_cluster_info() -> ClusterInfo | None:
    """ZeroTune's information for this rank; None without ZeroTune."""
    spec = training_spec_of_this_rank()
    if spec is None:
        return None
    trial = TrialInfo(AttrDict(spec.hparams), spec.seed, spec.experiment_config)
    return ClusterInfo(trial, spec.latest_checkpoint)
