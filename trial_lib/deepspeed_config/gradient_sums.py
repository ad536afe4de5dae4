"""The format in which DeepSpeed adds gradients up over micro-batches: `data_types.grad_accum_dtype`. Pure."""

from collections.abc import Mapping
from typing import Any

# deepspeed/runtime/config.py `DtypeEnum` (0.19.8).
_SHORT_NAMES = {
    **dict.fromkeys(("torch.float16", "float16", "half", "fp16"), "fp16"),
    **dict.fromkeys(("torch.float32", "float32", "float", "fp32"), "fp32"),
    **dict.fromkeys(("torch.bfloat16", "bfloat16", "bf16"), "bf16"),
}


def short_name(dtype: Any) -> str | None:
    """Returns the short name of a type by any of its names; None for anything else.

    Example:
        >>> short_name("torch.float32")
        'fp32'
    """
    return _SHORT_NAMES.get(dtype) if isinstance(dtype, str) else None


def adds_up_in_32_bits(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration asks for sums in 32 bits."""
    types = ds_config.get("data_types")
    return isinstance(types, Mapping) and short_name(types.get("grad_accum_dtype")) == "fp32"


def is_bf16_with_32_bit_sums(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether bf16 gradients add up in 32 bits.

    At stage 1 without offload, DeepSpeed's optimizer is then `BF16_Optimizer` (deepspeed/runtime/engine.py
    `_do_optimizer_sanity_check`).
    """
    sections = [ds_config.get(name) for name in ("bf16", "bfloat16")]
    is_bf16 = any(isinstance(section, Mapping) and section.get("enabled") is True for section in sections)
    return is_bf16 and adds_up_in_32_bits(ds_config)
