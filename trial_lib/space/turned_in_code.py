"""How you apply the switches that ZeroTune has turned in the trials: the line to write in your code. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from trial_lib.wire.turned import ATTENTION, CHECKPOINTING, COMPILE

_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing"


def _checkpointing(kind: Any) -> str:
    if kind == "none":
        return (
            "model.gradient_checkpointing_disable() before deepspeed.initialize, so that no activation is recomputed."
        )
    which = "the repeated blocks" if kind == "full" else "every second repeated block, from the first one on"
    return (
        f"activation checkpointing of {which} before deepspeed.initialize: a Hugging Face model has "
        f"gradient_checkpointing_enable with use_reentrant=False, and any other {_WRAPPER}."
    )


def _compile(is_on: Any) -> str:
    return "engine.compile() behind deepspeed.initialize." if is_on else "no engine.compile()."


def _attention(name: Any) -> str:
    return f'attn_implementation="{name}" where the model is loaded, or model.set_attn_implementation("{name}").'


_SAID: dict[str, Callable[[Any], str]] = {CHECKPOINTING: _checkpointing, COMPILE: _compile, ATTENTION: _attention}


def lines_to_write(turned: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each switch that the winner turned to another value than the program's own.

    Args:
        turned: the winner's, by name.
        own: those of the program.
    """
    return [
        f"ZeroTune turned {place} in the trials. In the code that is {_SAID[place](value)}"
        for place, value in turned.items()
        if value != own.get(place)
    ]
