"""The batch triple: train_batch_size = micro-batch size * accumulation steps * model replicas, with gaps filled in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from trial_lib.messages.errors import InputError

_WHERE = "the DeepSpeed configuration"


@dataclass(frozen=True)
class BatchSizes:
    """The samples of one optimizer step, and their division."""

    train_batch_size: int  # samples in one optimizer step, over all replicas
    micro_batch_size: int  # samples of a rank in one forward pass
    gradient_accumulation_steps: int  # micro-batches in one optimizer step


def resolve_batch(config: Mapping[str, Any], data_parallel_size: int) -> BatchSizes:
    """Returns the batch triple of a DeepSpeed configuration, its missing parts derived as DeepSpeed derives them.
    "auto" counts as missing, so that accumulation is 1 unless the other two give another number.

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


def sequence_parallel_size(engine: Any) -> int:
    """Returns the ranks that share the tokens of a sample (Ulysses); 1 without it, and before DeepSpeed had it."""
    return max(1, int(getattr(engine, "sequence_parallel_size", 1) or 1))


def replicas_of(engine: Any) -> int:
    """Returns the model replicas of an engine. Each has a batch of its own."""
    own = engine.dp_world_size
    if own is not None:
        return int(own)
    # deepspeed/utils/groups.py: under Ulysses DeepSpeed leaves it out, and ZeRO partitions over all ranks of a group.
    return max(1, int(engine.seq_dp_world_size) // sequence_parallel_size(engine))


# The format in which DeepSpeed adds gradients up over micro-batches: `data_types.grad_accum_dtype`.

# deepspeed/runtime/config.py `DtypeEnum` (0.19.8).
_SHORT_NAMES = {
    **dict.fromkeys(("torch.float16", "float16", "half", "fp16"), "fp16"),
    **dict.fromkeys(("torch.float32", "float32", "float", "fp32"), "fp32"),
    **dict.fromkeys(("torch.bfloat16", "bfloat16", "bf16"), "bf16"),
}


def short_name(dtype: Any) -> str | None:
    """Returns the short name of a type, such as `fp32`, by any of its names; None for anything else."""
    return _SHORT_NAMES.get(dtype) if isinstance(dtype, str) else None


def adds_up_in_32_bits(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration asks for sums in 32 bits."""
    types = ds_config.get("data_types")
    return isinstance(types, Mapping) and short_name(types.get("grad_accum_dtype")) == "fp32"


def is_bf16_with_32_bit_sums(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether bf16 gradients add up in 32 bits. At stage 1 without offload, DeepSpeed's optimizer is then
    `BF16_Optimizer` (deepspeed/runtime/engine.py `_do_optimizer_sanity_check`).
    """
    sections = [ds_config.get(name) for name in ("bf16", "bfloat16")]
    is_bf16 = any(isinstance(section, Mapping) and section.get("enabled") is True for section in sections)
    return is_bf16 and adds_up_in_32_bits(ds_config)
