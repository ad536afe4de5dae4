"""The data loaders of a trial, and their data for the loop."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trial_lib.training.context import DeepSpeedTrialContext
from trial_lib.training.data import DataLoader, custom_iterator
from trial_lib.training.deepspeed_trial import DeepSpeedTrial
from trial_lib.training.distributed import InvalidTrialError


@dataclass(frozen=True)
class Loaders:
    """The results of the trial's two methods; None on a rank that builds no loaders."""

    training: Any
    validation: Any


def build_loaders(trial: DeepSpeedTrial, context: DeepSpeedTrialContext, with_validation: bool) -> Loaders:
    """Lets the trial build its loaders, on the ranks that do.

    Raises:
        InvalidTrialError: a loader is of a kind that is not reproducible, and the checks are not disabled.
    """
    if not context.mpu.should_build_data_loader:
        return Loaders(None, None)
    training = _checked(trial.build_training_data_loader, context)
    validation = _checked(trial.build_validation_data_loader, context) if with_validation else None
    for loader in (training, validation):
        if context.needs_even_batches and isinstance(loader, DataLoader):
            _refuse_uneven_batches(loader, context)
    return Loaders(training, validation)


class CountedData:
    """The training data, with the number of micro-batches that this rank has taken. A call may take any number."""

    def __init__(self, batches: Iterator[Any], first: int) -> None:
        self._batches = batches
        self.read = first

    def __iter__(self) -> "CountedData":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.read += 1
        return batch


def training_iterator(
    loader: Any, context: DeepSpeedTrialContext, seed: int, first_micro_batch: int
) -> CountedData | None:
    """The endless training data from a micro-batch of this replica on; None on a rank without loaders."""
    if loader is None:
        return None
    if isinstance(loader, DataLoader):
        mpu = context.mpu
        batches = loader.training_iterator(
            seed, mpu.data_parallel_world_size, mpu.data_parallel_rank, first_micro_batch
        )
    else:
        batches = custom_iterator(loader, first_micro_batch)
    return CountedData(batches, first_micro_batch)


def validation_iterator(loader: Any, context: DeepSpeedTrialContext) -> Iterator[Any] | None:
    """One pass over the validation data; None on a rank without loaders."""
    if loader is None:
        return None
    if isinstance(loader, DataLoader):
        mpu = context.mpu
        loader = loader.validation_batches(mpu.data_parallel_world_size, mpu.data_parallel_rank)
    batches: Iterator[Any] = iter(loader)
    return batches


def micro_batches(loader: Any, context: DeepSpeedTrialContext) -> int | None:
    """The micro-batches of one pass on each replica, the same on every rank; None if unknown.

    The trial's own loaders may differ between ranks. The shortest counts, because all must take part in each step.
    """
    own: int | None = None
    if isinstance(loader, DataLoader):
        own = loader.micro_batches_per_epoch(context.mpu.data_parallel_world_size)
    elif hasattr(loader, "__len__"):
        try:
            own = len(loader)
        except TypeError:  # torch's, over an iterable dataset
            own = None
    known = [count for count in context.distributed.allgather(own) if count is not None]
    return min(known, default=None)


def _refuse_uneven_batches(loader: DataLoader, context: DeepSpeedTrialContext) -> None:
    """Refuses a pipeline's loader with batches of different sizes.

    DeepSpeed (runtime/pipe/engine.py) sends shapes once, and stages receive into buffers of the first batch. Another
    size would leave the stages waiting for each other.
    """
    size = context.train_micro_batch_size_per_gpu
    if loader.batch_size != size and loader.batch_sampler is None:
        raise InvalidTrialError(
            f"A loader of a pipeline has batches of {loader.batch_size}, and its stages exchange batches of {size}: "
            "use context.train_micro_batch_size_per_gpu in the training and in the validation loader."
        )
    if loader.has_short_batch(context.mpu.data_parallel_world_size):
        raise InvalidTrialError(
            f"The last batch of a pipeline's loader has fewer than {size} samples, and its stages exchange batches of "
            "one size. Set drop_last=True in the training and in the validation loader."
        )


def _of_the_engines_size(loader: Any, context: DeepSpeedTrialContext) -> Any:
    # A loader. One that `deepspeed.initialize` built for another micro-batch size is replaced.
    size = context.train_micro_batch_size_per_gpu
    engine = next((engine for engine in context.models if getattr(engine, "training_dataloader", None) is loader), None)
    if loader is None or engine is None or loader.batch_size == size:
        return loader
    return engine.deepspeed_io(loader.dataset, collate_fn=loader.collate_fn)


def _checked(build: Callable[[], Any], context: DeepSpeedTrialContext) -> Any:
    loader = _of_the_engines_size(build(), context)
    if isinstance(loader, DataLoader) or (not context.checks_loaders and hasattr(loader, "__iter__")):
        return loader
    if loader is None or not hasattr(loader, "__iter__"):
        raise InvalidTrialError(f"{build.__name__} returned {loader!r}, not a loader. Return a trial_lib.DataLoader.")
    raise InvalidTrialError(
        f"{build.__name__} returned a {type(loader).__module__}.{type(loader).__name__}, which neither shuffles "
        "reproducibly nor shards as the training does. Return a trial_lib.DataLoader, or call "
        "context.disable_dataset_reproducibility_checks() in __init__ and see to both yourself."
    )
