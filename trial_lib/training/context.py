"""The context of a `DeepSpeedTrial`: its hyperparameters, its place among the ranks, and its requests to the loop."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotune.trial_lib.deepspeed_config.overrides import sequence_parallel_size
from zerotune.trial_lib.messages.orders import TrainingSpec, UnitLength
from zerotune.trial_lib.training import model_parallel
from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError, move_to
from zerotune.trial_lib.training.metrics import MetricReducer, Reducers
from zerotune.trial_lib.training.model_parallel import (
    ModelParallelUnit,
    data_parallel_unit,
    pipeline_unit,
    sequence_unit,
)

# Hyperparameters as a dict with attributes.


class AttrDict(dict[str, Any]):
    """A dict whose keys are attributes too: `hparams.lr` is `hparams["lr"]`.

    It serves as the `args` of `deepspeed.initialize`. Mappings in it, also those in lists, become `AttrDict`s when they
    are put in. An object that is appended to a list afterwards stays unchanged. A key with the name of an attribute of
    dict (`items`, `update`, ...) can only be reached by index.
    """

    # Without a __dict__ nothing but a key can be an attribute.
    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, _readable(value))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(self._unknown(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(f'"{name}" is an attribute of every dict: set it by index, hparams["{name}"] = ...')
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(self._unknown(name)) from None

    def __or__(self, other: Any) -> Any:
        """The union of plain dicts would be one."""
        if not isinstance(other, dict):
            return NotImplemented
        merged = self.copy()
        merged.update(other)
        return merged

    def __ior__(self, other: Any) -> "AttrDict":  # type: ignore[override]
        """As `update`, which changes the other's mappings."""
        self.update(other)
        return self

    def copy(self) -> "AttrDict":
        return type(self)(self)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, [key for key in self if isinstance(key, str)])
        hint = f"; nearest known: {', '.join(near)}" if near else ""
        return f'There is no hyperparameter "{name}"{hint}.'


def _readable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value if isinstance(value, AttrDict) else AttrDict(value)
    if isinstance(value, list):
        items = [_readable(item) for item in value]
        # A list without mappings stays the same object: a shallow copy of an AttrDict shares its values.
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


# Lengths of a training, and the times of periodic events.


@dataclass(frozen=True)
class Pace:
    """The relation of batches, records and epochs in one training.

    A batch is an optimizer step. An epoch is a pass over the training loader, `micro_batches_per_epoch` long on each
    replica. If that is no multiple of the accumulation, an epoch ends within the batch that takes its last micro-batch.
    """

    train_batch_size: int  # samples of a batch, over all replicas
    accumulation: int  # micro-batches of a batch, on each replica
    micro_batches_per_epoch: int | None = None  # on each replica; None if the loader does not know
    records_per_epoch: int | None = None  # samples of an epoch, for a loader that does not know; None if unknown

    @property
    def _epochs_per_batch(self) -> tuple[int, int]:
        # The share of an epoch in a batch, as numerator and denominator; zero if unknown.
        if self.micro_batches_per_epoch is not None:
            return self.accumulation, self.micro_batches_per_epoch
        if self.records_per_epoch is not None:
            return self.train_batch_size, self.records_per_epoch
        return 0, 1

    @property
    def inexact_epochs(self) -> str | None:
        """Why epochs do not begin with a batch; None if they do, or if it is unknown."""
        part, whole = self._epochs_per_batch
        if not part or whole % part == 0:
            return None
        what = "micro-batches on each replica" if self.micro_batches_per_epoch is not None else "records"
        return (
            f"an epoch has {whole} {what}, which is no multiple of the {part} of a batch: epochs end within a batch, "
            "and the next one begins in the same"
        )

    def done(self, batches: int, unit: str) -> int:
        """How many of a unit (`batches`, `records` or `epochs`) are complete after so many batches.

        Raises:
            InvalidTrialError: epochs are asked for, and their length is not known.
        """
        if unit == "batches":
            return batches
        if unit == "records":
            return batches * self.train_batch_size
        part, whole = self._epochs_per_batch
        if not part:
            raise InvalidTrialError(
                "The experiment counts in epochs, and the training loader does not tell how long one is (it has no "
                "len()). Set records_per_epoch in the YAML, or count in batches or records."
            )
        return batches * part // whole

    def batches_for(self, length: UnitLength) -> int:
        """The first number of batches that reaches a length."""
        unit, count = _only(length)
        self.done(0, unit)
        part, whole = {"batches": (1, 1), "records": (self.train_batch_size, 1)}.get(unit, self._epochs_per_batch)
        return -(-count * whole // part)

    def is_due(self, period: UnitLength | None, batches: int) -> bool:
        """Whether the last batch has completed a period; never for None or 0."""
        if period is None:
            return False
        unit, count = _only(period)
        return count > 0 and self.done(batches, unit) // count > self.done(batches - 1, unit) // count

    def epoch_of(self, batch_idx: int) -> int:
        """The epoch, from 0, that a batch begins in; 0 if unknown."""
        part, whole = self._epochs_per_batch
        return batch_idx * part // whole

    def is_epoch_start(self, batch_idx: int) -> bool:
        """Whether a batch is the first that begins in its epoch."""
        return batch_idx == 0 or self.epoch_of(batch_idx) != self.epoch_of(batch_idx - 1)

    def is_epoch_end(self, batch_idx: int) -> bool:
        return self.epoch_of(batch_idx + 1) != self.epoch_of(batch_idx)


def _only(length: UnitLength) -> tuple[str, int]:
    ((unit, count),) = length.items()
    return unit, count


# What the trial sees of the loop.


class DeepSpeedTrialContext:
    """The loop's side of a trial; one for each rank.

    Attributes:
        distributed: this rank's place, and the exchange of Python objects between ranks.
        device: the device of this rank.
        models: the registered engines, in their order.
        reducers: the registered metric reducers.
    """

    def __init__(self, spec: TrainingSpec, distributed: DistributedContext, device: torch.device) -> None:
        self.distributed = distributed
        self.device = device
        self.models: list[Any] = []
        self.reducers = Reducers()
        self.accumulates_automatically = True
        self.checks_loaders = True
        self.profiler: Any = None
        self.spec = spec
        self._mpu: ModelParallelUnit | None = None
        self.has_own_mpu = False  # whether the trial has set it
        self._writer: Any = None
        self._stop_requested = False
        # Set by the loop.
        self.pace: Pace | None = None
        self.batch_idx = 0
        self.training_iterator: Iterator[Any] | None = None
        self.validation_iterator: Iterator[Any] | None = None

    # -- the experiment --------------------------------------------------------------------------------

    def get_hparams(self) -> AttrDict:
        """A copy of the hyperparameters, with keys and attributes."""
        return AttrDict(self.spec.hparams)

    def get_hparam(self, name: str) -> Any:
        return self.get_hparams()[name]

    def get_experiment_config(self) -> dict[str, Any]:
        """The experiment's YAML as a dict, without values of secrets."""
        return AttrDict(self.spec.experiment_config)

    def get_data_config(self) -> dict[str, Any]:
        data: dict[str, Any] = self.get_experiment_config().get("data") or {}
        return data

    def get_trial_seed(self) -> int:
        return self.spec.seed

    # -- engines -------------------------------------------------------------------------------------------------

    def wrap_model_engine(self, model: Any) -> Any:
        """Registers an engine, the first result of `deepspeed.initialize`, and returns it.

        The loop saves it, loads it and counts its batches. The first engine's batch size is the training's. A pipeline
        engine finds the loop's data by itself from then on. You may call its `train_batch()` and `eval_batch()` without
        an iterator.

        Raises:
            InvalidTrialError: it is no engine, or is registered already.
        """
        if not hasattr(model, "train_micro_batch_size_per_gpu"):
            raise InvalidTrialError(
                f"wrap_model_engine was given a {type(model).__name__}. Give it the engine: the first of what "
                "deepspeed.initialize returns (engine, optimizer, training loader, learning rate scheduler)."
            )
        if any(model is registered for registered in self.models):
            raise InvalidTrialError("wrap_model_engine was given the same engine twice. Register each engine once.")
        self.models.append(model)
        if model_parallel.is_pipeline(model):
            model_parallel.supply_iterators(model, lambda: self.training_iterator, lambda: self.validation_iterator)
        if self._mpu is None:
            self._mpu = self._own_unit(model)
        return model

    def _own_unit(self, model: Any) -> ModelParallelUnit:
        if model_parallel.is_pipeline(model):
            return pipeline_unit(model.grid)
        if sequence_parallel_size(model) > 1:
            return sequence_unit(model, self.distributed)
        return data_parallel_unit(self.distributed)

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Sets the ranks that hold replicas, build loaders and report metrics, if the engine cannot tell.

        Call it once, after an engine is registered.
        """
        if not isinstance(mpu, ModelParallelUnit):
            raise InvalidTrialError(
                f"set_mpu was given a {type(mpu).__name__}. Give it a ModelParallelUnit; an mpu of DeepSpeed's or "
                "Megatron's belongs into deepspeed.initialize(mpu=...)."
            )
        if not self.models:
            raise InvalidTrialError("set_mpu was called before an engine is registered. Call wrap_model_engine first.")
        if self.has_own_mpu:
            raise InvalidTrialError("set_mpu was called twice. Set one ModelParallelUnit: it counts for all engines.")
        self._mpu = mpu
        self.has_own_mpu = True

    @property
    def mpu(self) -> ModelParallelUnit:
        """This rank's part in the model parallelism. An engine has to be registered."""
        self._first_engine("the model parallel unit")
        assert self._mpu is not None
        return self._mpu

    @property
    def use_pipeline_parallel(self) -> bool:
        """Whether an engine is a pipeline. Then `train_batch` is called once for each batch."""
        return any(model_parallel.is_pipeline(model) for model in self.models)

    @property
    def needs_even_batches(self) -> bool:
        """Whether all batches must have one size, because the stages of a pipeline exchange their shapes once."""
        engine = self.models[0]
        return model_parallel.is_pipeline(engine) and not getattr(engine.module, "dynamic_shape", False)

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """The first engine's micro-batch size, in samples: the size of a training loader's batches."""
        return int(self._first_engine("train_micro_batch_size_per_gpu").train_micro_batch_size_per_gpu())

    @property
    def num_micro_batches_per_slot(self) -> int:
        """Micro-batches of each rank in one batch: the first engine's `gradient_accumulation_steps`."""
        return int(self._first_engine("num_micro_batches_per_slot").gradient_accumulation_steps())

    def get_train_micro_batch_size_per_gpu(self) -> int:
        return self.train_micro_batch_size_per_gpu

    def get_num_micro_batches_per_slot(self) -> int:
        return self.num_micro_batches_per_slot

    def _first_engine(self, what: str) -> Any:
        if not self.models:
            raise InvalidTrialError(
                f"There is no engine yet to tell {what}. Call context.wrap_model_engine in the trial's __init__ first."
            )
        return self.models[0]

    # -- requests to the loop -------------------------------------------------------------------------

    def disable_auto_grad_accumulation(self) -> None:
        """Calls `train_batch` once for each batch. It takes all micro-batches of the batch itself."""
        self.accumulates_automatically = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allows other loaders than `zerotune.DataLoader`, with their own shuffling and sharding."""
        self.checks_loaders = False

    def wrap_reducer(
        self,
        reducer: Callable[[list[Any]], Any] | MetricReducer,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Registers a metric that is not an average. Returns the reducer, whose `update(value)` the trial calls.

        Args:
            reducer: a `MetricReducer`, or a function of the list of all values that were given to `update` on all
                ranks.
            name: of the metric. Without one the reducer returns a dict of metrics.
            for_training: whether it is a training metric.
            for_validation: whether it is a validation metric.

        Raises:
            InvalidTrialError: it is neither, it would never be used, or the name is taken.
        """
        return self.reducers.wrap(reducer, name, for_training=for_training, for_validation=for_validation)

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profiles the training by `torch.profiler.profile(*args, **kwargs)`, one profiler step a batch.

        Traces go to the TensorBoard folder, unless `on_trace_ready` is given.
        """
        kwargs.setdefault("on_trace_ready", torch.profiler.tensorboard_trace_handler(str(self.get_tensorboard_path())))
        self.profiler = torch.profiler.profile(*args, **kwargs)

    def get_stop_requested(self) -> bool:
        """Whether this rank has asked the training to stop."""
        return self._stop_requested

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Requests the training to stop, from any rank. At the next report it validates, saves and ends."""
        if not isinstance(stop_requested, bool):
            raise InvalidTrialError(f"set_stop_requested takes True or False, not {stop_requested!r}.")
        self._stop_requested = stop_requested

    # -- moving data ---------------------------------------------------------------------------------------------

    def to_device(self, data: Any) -> Any:
        """Moves tensors, and containers of them to any depth, to this rank's device. Other values stay unchanged."""
        return move_to(self.device, data)

    # -- progress -------------------------------------------------------------------------------

    def is_epoch_start(self) -> bool:
        """Whether the current batch is the first that begins in its epoch."""
        return self._pace.is_epoch_start(self.batch_idx)

    def is_epoch_end(self) -> bool:
        """Whether the current batch ends its epoch."""
        return self._pace.is_epoch_end(self.batch_idx)

    def current_train_epoch(self) -> int:
        """The epoch of the current batch, from 0."""
        return self._pace.epoch_of(self.batch_idx)

    def current_train_batch(self) -> int:
        """The current batch since the start of training, from 0."""
        return self.batch_idx

    @property
    def _pace(self) -> Pace:
        if self.pace is None:
            raise InvalidTrialError("There is no current batch before the training starts. Ask in train_batch.")
        return self.pace

    # -- TensorBoard ---------------------------------------------------------------------------------------------

    def get_tensorboard_path(self) -> Path:
        """This rank's folder for TensorBoard's files. Rank 0 has the training's, the others one in it."""
        root = Path(self.spec.tensorboard or "tensorboard")
        rank = self.distributed.rank
        path = root if rank == 0 else root / f"rank{rank}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def get_tensorboard_writer(self) -> Any:
        """This rank's `torch.utils.tensorboard.SummaryWriter`, the same each time."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise InvalidTrialError(
                    f"A TensorBoard writer needs the package tensorboard ({error}): pip install tensorboard."
                ) from None
            self._writer = SummaryWriter(log_dir=str(self.get_tensorboard_path()))
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
