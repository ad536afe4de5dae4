"""The batch triple: train_batch_size = micro-batch size * accumulation steps * model replicas, with gaps filled in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from trial_lib.wire.errors import InputError

# The name of the configuration in errors.
_WHERE = "the DeepSpeed configuration"


@dataclass(frozen=True)
class BatchSizes:
    """The samples of one optimizer step, and their division.

    Attributes:
        train_batch_size: samples in one optimizer step, over all replicas.
        micro_batch_size: samples of a rank in one forward pass.
        gradient_accumulation_steps: micro-batches in one optimizer step.
    """

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


def resolve_batch(config: Mapping[str, Any], data_parallel_size: int) -> BatchSizes:
    """Returns the batch triple of a DeepSpeed configuration, its missing parts derived as DeepSpeed derives them.

    "auto" counts as missing, so that accumulation is 1 unless the other two give another number.

    Args:
        config: a DeepSpeed configuration.
        data_parallel_size: model replicas that train side by side.

    Raises:
        InputError: the parts contradict each other, one of them is not a whole number above 0, or too few are given.

    Example:
        >>> resolve_batch({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, data_parallel_size=2)
        BatchSizes(train_batch_size=32, micro_batch_size=4, gradient_accumulation_steps=4)
    """
    train, micro, accumulation = (_given(config, key) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION))
    if micro is None:
        if train is None:
            raise InputError(
                f"neither {TRAIN_BATCH} nor {MICRO_BATCH} says how large a batch is.",
                where=_WHERE,
                remedy=f"Set {MICRO_BATCH} to a number.",
            )
        micro = train // data_parallel_size // (accumulation or 1)
    elif train is not None and accumulation is None:
        accumulation = train // micro // data_parallel_size
    if accumulation is None:
        accumulation = 1
    product = micro * accumulation * data_parallel_size
    if train not in (None, product):
        raise InputError(
            f"{TRAIN_BATCH}({train}) != "
            f"micro({micro}) * accumulation({accumulation}) * replicas({data_parallel_size}).",
            where=_WHERE,
            remedy=f"Change one of them, or leave {TRAIN_BATCH} out: it follows from the others.",
        )
    return BatchSizes(product, micro, accumulation)


def _given(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if type(value) is not int or value < 1:
        raise InputError(f"{key} is {value!r}.", where=_WHERE, remedy="Make it a whole number above 0.")
    return value
