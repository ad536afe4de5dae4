"""The data loaders of a trial, and their data as the loop takes it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trial_lib.training.context import DeepSpeedTrialContext
from trial_lib.training.data_loader import DataLoader, custom_iterator
from trial_lib.training.deepspeed_trial import DeepSpeedTrial
from trial_lib.training.errors import InvalidTrialError


@dataclass(frozen=True)
class Loaders:
    """What the trial's two methods returned; None on a rank that builds no loaders."""

    training: Any
    validation: Any


def build_loaders(trial: DeepSpeedTrial, context: DeepSpeedTrialContext, with_validation: bool) -> Loaders:
    """Has the trial build its loaders, on the ranks that do.

    Args:
        trial: the trial, its engines registered.
        context: the trial's.
        with_validation: whether a validation will come.

    Raises:
        InvalidTrialError: a loader is of a kind that is not reproducible, and the checks are not disabled.
    """
    if not context.mpu.should_build_data_loader:
        return Loaders(None, None)
    training = _checked(trial.build_training_data_loader, context)
    return Loaders(training, _checked(trial.build_validation_data_loader, context) if with_validation else None)


def training_iterator(
    loader: Any, context: DeepSpeedTrialContext, seed: int, first_micro_batch: int
) -> Iterator[Any] | None:
    """Returns the endless training data from a micro-batch of this replica on; None on a rank without loaders."""
    if loader is None:
        return None
    if isinstance(loader, DataLoader):
        mpu = context.mpu
        return loader.training_iterator(seed, mpu.data_parallel_world_size, mpu.data_parallel_rank, first_micro_batch)
    return custom_iterator(loader, first_micro_batch)


def validation_iterator(loader: Any, context: DeepSpeedTrialContext) -> Iterator[Any] | None:
    """Returns one pass over the validation data; None on a rank without loaders."""
    if loader is None:
        return None
    if isinstance(loader, DataLoader):
        mpu = context.mpu
        loader = loader.validation_batches(mpu.data_parallel_world_size, mpu.data_parallel_rank)
    batches: Iterator[Any] = iter(loader)
    return batches


def micro_batches(loader: Any, context: DeepSpeedTrialContext) -> int | None:
    """Returns the micro-batches of one pass on each replica, the same on every rank; None where nobody can tell.

    Loaders of the trial's own may differ between ranks: the shortest counts, for all must take part in each step.
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


def _checked(build: Callable[[], Any], context: DeepSpeedTrialContext) -> Any:
    loader = build()
    if isinstance(loader, DataLoader) or (not context.checks_loaders and hasattr(loader, "__iter__")):
        return loader
    if loader is None or not hasattr(loader, "__iter__"):
        raise InvalidTrialError(f"{build.__name__} returned {loader!r}, not a loader. Return a trial_lib.DataLoader.")
    raise InvalidTrialError(
        f"{build.__name__} returned a {type(loader).__module__}.{type(loader).__name__}, which neither shuffles "
        "reproducibly nor shards as the training does. Return a trial_lib.DataLoader, or call "
        "context.disable_dataset_reproducibility_checks() in __init__ and see to both yourself."
    )
