"""How you apply the switches that ZeroTune has turned in the trials: the line to write in your code. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from trial_lib.deepspeed_config.overrides import MICRO_BATCH
from trial_lib.records.result import ProgramProfile
from trial_lib.wire.turned import ATTENTION, CHECKPOINTING, COMPILE, FUSED, PERSISTENT, PINNED, PREFETCH, WORKERS

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
_OF_LOADER = (WORKERS, PREFETCH, PINNED, PERSISTENT)


def _loader(place: str, value: Any, found: ProgramProfile) -> str:
    name = place.partition(":")[2]
    if found.loading is not None and found.loading.by_trainer:
        return f"{_typed(f'dataloader_{name}', value)} of the training arguments."
    line = found.loading.made_at if found.loading is not None else ""
    return f"{name}={value} in the DataLoader{f' at {line}' if line else ''}."


def _fused(value: Any, found: ProgramProfile) -> str:
    if MICRO_BATCH in found.batch:
        # Hugging Face's training arguments have the batch, so the Trainer makes the optimizer.
        return f"{_typed('optim', 'adamw_torch_fused' if value else 'adamw_torch')} of the training arguments."
    return f"fused={value} in {found.optimizer.rpartition('.')[2] or 'the optimizer'}(...)."


def _typed(name: str, value: Any) -> str:
    return f"--{name} {value}, or {name}={value!r},"


def lines_to_write(turned: Mapping[str, Any], own: Mapping[str, Any], found: ProgramProfile | None = None) -> list[str]:
    """Returns a sentence for each switch that the winner turned to another value than the program's own.

    Args:
        turned: the winner's, by name.
        own: those of the program.
        found: what the profile trial found of the program.
    """

    def said(place: str, value: Any) -> str:
        if place in _OF_LOADER:
            return _loader(place, value, found or ProgramProfile())
        return _fused(value, found or ProgramProfile()) if place == FUSED else _SAID[place](value)

    return [
        f"ZeroTune turned {place} in the trials. In the code that is {said(place, value)}"
        for place, value in turned.items()
        if value != own.get(place)
    ]
