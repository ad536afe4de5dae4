"""The attention implementation of a Hugging Face model."""

import importlib.util
from typing import Any

from trial_lib.turned.found import Found
from trial_lib.turned.models import inner_model
from trial_lib.wire.turned import ATTENTION, TURNED

# The attribute of a model's class that says whether it can have an implementation. The older name is that of
# transformers before 4.53.
_SAYS = {
    "sdpa": ("_supports_sdpa",),
    "flash_attention_2": ("_supports_flash_attn", "_supports_flash_attn_2"),
}


def find(model: Any) -> Found:
    """Returns the implementations that a model can have, its own first."""
    model = inner_model(model)
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(own, str):
        return Found(reason="the model is none of Hugging Face's")
    if not _can_change(model):
        return Found(reason=f"{type(model).__name__} chooses its attention when it is made")
    values = tuple(name for name in TURNED[ATTENTION].values if name == "eager" or _supports(model, name))
    return Found.of(own, values) if own in values else Found(reason=f"its attention is {own}, which ZeroTune leaves")


def turn(model: Any, name: str) -> None:
    """Gives a model another implementation.

    Raises:
        ValueError: transformers refuses it, or keeps another one.
    """
    model = inner_model(model)
    if model.config._attn_implementation == name:
        return
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} keeps the attention {model.config._attn_implementation}.")


def _can_change(model: Any) -> bool:
    """Returns whether the layers ask for the implementation in each forward pass (transformers from 4.48 on)."""
    asks = getattr(model, "_can_set_attn_implementation", None)
    return hasattr(model, "set_attn_implementation") and (asks is None or bool(asks()))


def _supports(model: Any, name: str) -> bool:
    if not any(getattr(model, says, False) for says in _SAYS[name]):
        return False
    if name != "flash_attention_2":
        return True
    from deepspeed.accelerator import get_accelerator

    # Its kernels are for GPUs alone, and transformers refuses them elsewhere.
    return bool(get_accelerator().device_name() == "cuda") and importlib.util.find_spec("flash_attn") is not None
