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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from trial_lib.messages.folders import StopRequest
from trial_lib.messages.orders import TrainingSpec, training_spec_of_this_rank
from trial_lib.training.checkpoints import CheckpointStore
from trial_lib.training.context import AttrDict
from trial_lib.training.core_checkpoints import CheckpointContext, CoreProgress, KeptCheckpoints, LooseCheckpoints
from trial_lib.training.distributed import DistributedContext, InvalidTrialError
from trial_lib.training.records import Recorder

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
