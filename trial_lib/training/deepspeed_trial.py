"""The class that a user writes: a training."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trial_lib.training.callbacks import PyTorchCallback
from trial_lib.training.context import DeepSpeedTrialContext
from trial_lib.training.data import TorchData


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
        """The training data: a `trial_lib.DataLoader` with batches of `context.train_micro_batch_size_per_gpu`.

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
