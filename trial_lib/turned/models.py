"""The model within those that libraries wrap around it."""

from typing import Any

# The attribute by which a wrapper has the model: torch.compile, PEFT's two layers, DDP, Lightning and users' own.
_INNER = ("_orig_mod", "base_model", "module", "model")
_MOST_WRAPPERS = 6


def inner_model(model: Any) -> Any:
    """Returns the Hugging Face model within wrappers. Without one it is the given model.

    Args:
        model: as `deepspeed.initialize` gets it.
    """
    found = model
    for _ in range(_MOST_WRAPPERS):
        if hasattr(type(found), "set_attn_implementation") or hasattr(type(found), "gradient_checkpointing_enable"):
            return found
        inner = next((part for name in _INNER if (part := vars(found).get("_modules", {}).get(name)) is not None), None)
        if inner is None:
            return model
        found = inner
    return model
