"""The precision in which an engine keeps its model and computes, whether configuration, flags or code decide on it."""

from collections.abc import Iterable
from typing import Any

import torch

from trial_lib.device.rank.here import device_of


def settled(engine: Any) -> dict[str, Any]:
    """Returns the engine's values for keys that may be "auto", as a part of a configuration.

    Only keys that the Hugging Face Trainer and Accelerate fill in from their own arguments, or from the model, are
    included. They are the same for every candidate. Other "auto" values differ from stage to stage.
    """
    half = {"fp16": engine.fp16_enabled(), "bf16": engine.bfloat16_enabled(), "bfloat16": engine.bfloat16_enabled()}
    # DeepSpeed 0.19.8 does not support apex any more.
    sections = {**half, "amp": getattr(engine, "amp_enabled", bool)()}
    return {
        **{name: {"enabled": bool(enabled)} for name, enabled in sections.items()},
        "zero_optimization": {"reduce_bucket_size": int(engine.zero_reduce_bucket_size())},
    }


def formats(engine: Any) -> set[str]:
    """Returns the number formats that an engine shows now: its parameters' formats, those of autocast, and TF32."""
    found = names(parameter.dtype for parameter in engine.module.parameters())
    kind = engine.device.type
    if torch.is_autocast_enabled(kind):
        found |= names([torch.get_autocast_dtype(kind)])
    return found | ({"tf32"} if device_of(engine.device).multiplies_in_tf32(engine.module) else set())


def names(dtypes: Iterable[torch.dtype]) -> set[str]:
    """Returns the names of the floating-point types, such as `bfloat16`."""
    return {str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point}


def bytes_by_code(engine: Any) -> int | None:
    """Returns the mean bytes of a parameter as the code has made it; None if the configuration decides."""
    if engine.fp16_enabled() or engine.bfloat16_enabled():
        return None
    sizes = [(parameter.element_size(), elements(parameter)) for parameter in engine.module.parameters()]
    count = sum(number for _, number in sizes)
    return max(1, round(sum(size * number for size, number in sizes) / count)) if count else None


def elements(parameter: torch.nn.Parameter) -> int:
    """Returns the elements of a parameter, also of one that ZeRO 3 has partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
