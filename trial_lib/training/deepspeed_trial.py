"""The classes that a user writes: a training, and callbacks for points of it that call the user's code."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from zerotune.trial_lib.training.context import DeepSpeedTrialContext
from zerotune.trial_lib.training.data import TorchData
from zerotune.trial_lib.training.distributed import InvalidTrialError


class PyTorchCallback:
    """The user's code for points of the training. Override the methods that you need.

    Every rank has its own copy and calls it. Use `context.distributed.rank` for work of one rank. A callback with a
    state overrides `state_dict` and `load_state_dict`, so that a resumed training has the state too.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Called once, before everything else. Trial and data loaders are built, and no checkpoint is loaded yet.

        `first_batch_idx` is the optimizer step that the training resumes at, and `checkpoint_uuid` the checkpoint that
        it resumes from: 0 and None for a new training.
        """

    def on_training_start(self) -> None:
        """Called once, before the first batch."""

    def on_training_end(self) -> None:
        """Called once, when the training has reached its length."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Called before the first batch of an epoch, from 0; `on_training_epoch_start(self)` is accepted too."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Called after the last batch of an epoch, from 0."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Called at each report of training metrics.

        `avg_metrics` are as reported: over all batches since the last report, and all ranks. `batch_metrics` are what
        this rank's `train_batch` returned since then, call by call.
        """

    def on_validation_start(self) -> None:
        """Called before each validation."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first batch of each validation, after `on_validation_start`."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Called after the last batch of each validation, before `on_validation_end`.

        `outputs` are what this rank's `evaluate_batch` returned, call by call.
        """

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Called after each validation, with the metrics over all batches and ranks."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is loaded, with the loop's own part of it."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written, with the loop's own part of it."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Called when a checkpoint's files are written. Files that you add to this unfinished folder belong to it."""

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Called when a checkpoint is complete, with its folder."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Called when a checkpoint is in its final place, after `on_checkpoint_end`, with its name."""

    def on_trial_shutdown(self) -> None:
        """Called once, after everything else, even if the training failed."""

    def state_dict(self) -> dict[str, Any]:
        """The callback's state for a checkpoint: plain values and tensors in dicts and lists."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned when the checkpoint was made."""


HOOKS = tuple(name for name in vars(PyTorchCallback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of a trial, called in their order.

    Overridden hooks are found once, here. Calling a hook that no callback overrides costs one look-up.
    """

    def __init__(self, callbacks: dict[str, PyTorchCallback]) -> None:
        if not isinstance(callbacks, dict):
            raise InvalidTrialError(
                f"build_callbacks returned a {type(callbacks).__name__}: it has to return a dict of callbacks by name."
            )
        for name, callback in callbacks.items():
            if not isinstance(name, str):
                raise InvalidTrialError(
                    f"build_callbacks returned a callback under {name!r}: names have to be strings."
                )
            if isinstance(callback, type):
                raise InvalidTrialError(
                    f'build_callbacks returned the class {callback.__name__} as "{name}": give an instance, '
                    f"{callback.__name__}(...)."
                )
            if not isinstance(callback, PyTorchCallback):
                raise InvalidTrialError(
                    f'build_callbacks returned a {type(callback).__name__} as "{name}": a callback has to be a '
                    "PyTorchCallback."
                )
        self._callbacks = callbacks
        self._overriding = {hook: _overriding(hook, callbacks) for hook in HOOKS}

    def is_overridden(self, hook: str) -> bool:
        """If not, the hook's arguments need not be collected."""
        return bool(self._overriding[hook])

    def call(self, hook: str, *args: Any) -> None:
        for function in self._overriding[hook]:
            function(*args)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {name: callback.state_dict() for name, callback in self._callbacks.items()}

    def load_state_dict(self, states: dict[str, dict[str, Any]]) -> None:
        """A callback that is new or gone since the checkpoint is ignored."""
        for name, callback in self._callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])


def _overriding(hook: str, callbacks: dict[str, PyTorchCallback]) -> list[Callable[..., None]]:
    default = getattr(PyTorchCallback, hook)
    expected = list(inspect.signature(default).parameters)[1:]
    functions: list[Callable[..., None]] = []
    for name, callback in callbacks.items():
        function = getattr(callback, hook)
        if getattr(function, "__func__", None) is default:
            continue
        if _takes(function, len(expected)):
            functions.append(function)
        elif hook == "on_training_epoch_start" and _takes(function, 0):
            functions.append(_without_arguments(function))
        else:
            raise InvalidTrialError(
                f'The callback "{name}" defines {hook}{inspect.signature(function)}, but it is called with '
                f"({', '.join(expected)})."
            )
    return functions


def _takes(function: Callable[..., None], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def _without_arguments(function: Callable[..., None]) -> Callable[..., None]:
    return lambda *_: function()


class DeepSpeedTrial(ABC):
    """A training with DeepSpeed, in the parts that a loop calls.

    `__init__` builds the model and its engine (`deepspeed.initialize`) and registers the engine with
    `context.wrap_model_engine`. The process group exists by then.
    """

    @abstractmethod
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        """Builds models and engines. Keep the context as `self.context`."""

    @abstractmethod
    def build_training_data_loader(self) -> Any:
        """The training data: a `zerotune.DataLoader` with batches of `context.train_micro_batch_size_per_gpu`.

        Another kind of loader is refused unless `context.disable_dataset_reproducibility_checks()` was called. The
        method runs on the ranks that build loaders. With pipeline parallelism these are the first and the last stage.
        """

    @abstractmethod
    def build_validation_data_loader(self) -> Any:
        """The validation data, as `build_training_data_loader` for training."""

    @abstractmethod
    def train_batch(
        self, dataloader_iter: Iterator[TorchData] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        """Trains on one micro-batch: forward, backward and step of the engine.

        It is called `gradient_accumulation_steps` times for one batch. With pipeline parallelism, and after
        `context.disable_auto_grad_accumulation()`, it is called once and trains on the whole batch.

        Args:
            dataloader_iter: the training data, micro-batch after micro-batch; None on a rank without loaders.
            epoch_idx: the epoch, from 0.
            batch_idx: the batch (optimizer step) since the start of training, from 0.

        Returns:
            The loss, or metrics by name: tensors of one element, or numbers. They are averaged over the batches of a
            report and over the ranks.
        """

    @abstractmethod
    def evaluate_batch(self, dataloader_iter: Iterator[TorchData] | None, batch_idx: int) -> dict[str, Any]:
        """Evaluates one micro-batch; with pipeline parallelism, `gradient_accumulation_steps` of them.

        It is called under `torch.no_grad()`, with the engines in evaluation mode.

        Args:
            dataloader_iter: the validation data; None on a rank without loaders.
            batch_idx: the call, from 0 in each validation.

        Returns:
            Metrics by name, the same names each time: tensors of one element, or numbers. They are averaged over calls
            and ranks.
        """

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Callbacks by name; the names identify their states in a checkpoint."""
        return {}

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Saves the engines into an empty folder that all ranks share; called on every rank.

        Whatever is written there becomes part of the checkpoint.
        """
        for index, engine in enumerate(context.models):
            engine.save_checkpoint(str(path), tag=f"model{index}")

    def load(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Loads the engines from a folder that `save` has written; called on every rank."""
        for index, engine in enumerate(context.models):
            loaded, _ = engine.load_checkpoint(str(path), tag=f"model{index}")
            if loaded is None:
                raise RuntimeError(f"{path} holds no checkpoint of engine {index}.")
