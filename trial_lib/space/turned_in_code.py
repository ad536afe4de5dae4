"""How you apply the switches that ZeroTune has turned: by a Trainer's options, or a line in your code. Pure."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trial_lib.deepspeed_config.overrides import MICRO_BATCH
from trial_lib.records.result import ProgramProfile
from trial_lib.wire.turned import (
    ATTENTION,
    CHECKPOINTING,
    COMPILE,
    COMPILE_OPTION,
    FUSED,
    LOADER_OPTIONS,
    OPTIMIZER_OPTION,
    PERSISTENT,
    PREFETCH,
    WORKERS,
)

_OF_WORKERS = (PREFETCH, PERSISTENT)
"""Settings of workers. Torch and the Trainer refuse them if there are none."""

_BY_CALL = "calls each such block by torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False)"


def _checkpointing(kind: Any) -> str:
    if kind == "none":
        return (
            "model.gradient_checkpointing_disable() before deepspeed.initialize, so that no activation is recomputed."
        )
    which = "the repeated blocks" if kind == "full" else "every second repeated block, from the first one on"
    return (
        f"activation checkpointing of {which} before deepspeed.initialize: a Hugging Face model has "
        f"gradient_checkpointing_enable with use_reentrant=False, and any other {_BY_CALL}."
    )


def _compile(is_on: Any) -> str:
    return "engine.compile() behind deepspeed.initialize." if is_on else "no engine.compile()."


def _attention(name: Any) -> str:
    return f'attn_implementation="{name}" where the model is loaded, or model.set_attn_implementation("{name}").'


_SAID: dict[str, Callable[[Any], str]] = {CHECKPOINTING: _checkpointing, COMPILE: _compile, ATTENTION: _attention}


def _loader(place: str, value: Any, found: ProgramProfile) -> str:
    name = place.partition(":")[2]
    by_trainer = found.loading is not None and found.loading.by_trainer
    refused = [f"{'dataloader_' if by_trainer else ''}{each.partition(':')[2]}" for each in _OF_WORKERS]
    without = f", without {' and '.join(refused)}" if (place, value) == (WORKERS, 0) else ""
    if by_trainer:
        return f"{_typed(LOADER_OPTIONS[place].lstrip('-'), value)} of the training arguments{without}."
    line = found.loading.made_at if found.loading is not None else ""
    return f"{name}={value} in the DataLoader{f' at {line}' if line else ''}{without}."


def _fused(value: Any, found: ProgramProfile) -> str:
    if MICRO_BATCH in found.batch:
        # Hugging Face's training arguments have the batch, so the Trainer makes the optimizer.
        return f"{_typed(OPTIMIZER_OPTION.lstrip('-'), _adam(value))} of the training arguments."
    # An explicit False would keep torch from its own choice of a form.
    if not found.optimizer:
        # DeepSpeed makes it, and hands on what `params` has beside `torch_adam` (deepspeed/runtime/engine.py).
        word = '"fused": true' if value else 'no "fused"'
        return f"{word} in optimizer.params of the DeepSpeed configuration."
    optimizer = found.optimizer.rpartition(".")[2]
    return f"fused=True in {optimizer}(...)." if value else f"{optimizer}(...) without fused=True."


def _adam(is_fused: Any) -> str:
    """Returns the name that the Trainer has for a form of torch's AdamW."""
    return "adamw_torch_fused" if is_fused else "adamw_torch"


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
        if place in LOADER_OPTIONS:
            return _loader(place, value, found or ProgramProfile())
        return _fused(value, found or ProgramProfile()) if place == FUSED else _SAID[place](value)

    return [
        f"ZeroTune turned {place} in the trials. In the code that is {said(place, turned[place])}"
        for place in differing(turned, own)
    ]


def trainer_options(turned: Mapping[str, Any], own: Mapping[str, Any], offered: Collection[str]) -> dict[str, str]:
    """Returns the options of a Trainer's command line that set switches as the trials had them, with their values.

    Args:
        turned: the winner's, by name.
        own: those of the program.
        offered: options that the program's parser has, and that have an effect there.
    """
    options: dict[str, str] = {}
    for place in differing(turned, own):
        options |= _options_of(place, turned[place], offered)
    return options


def options_to_remove(turned: Mapping[str, Any], own: Mapping[str, Any], offered: Collection[str]) -> list[str]:
    """Returns the options of a Trainer's command line that it refuses with the options of `trainer_options`.

    Args: as for `trainer_options`.
    """
    # Without workers the Trainer refuses the user's own settings of workers too.
    has_none = trainer_options(turned, own, offered).get(LOADER_OPTIONS[WORKERS]) == "0"
    return [LOADER_OPTIONS[place] for place in _OF_WORKERS] if has_none else []


def left_to_write(turned: Mapping[str, Any], own: Mapping[str, Any], offered: Collection[str]) -> dict[str, Any]:
    """Returns the switches that no option of the Trainer's sets.

    Args: as for `trainer_options`.
    """
    return {place: turned[place] for place in differing(turned, own) if not _options_of(place, turned[place], offered)}


def differing(turned: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Returns the switches with another value than the program's own, as far as they have an effect."""
    others = [place for place, value in turned.items() if value != own.get(place)]
    # Without workers ranks leave these out, because torch and the Trainer refuse them.
    without = () if turned.get(WORKERS, own.get(WORKERS)) != 0 else _OF_WORKERS
    return [place for place in others if place not in without]


def _options_of(place: str, value: Any, offered: Collection[str]) -> dict[str, str]:
    if place == ATTENTION:
        options = {"--attn_implementation": str(value)}
    elif place == COMPILE:
        options = {COMPILE_OPTION: str(value)}
    elif place == FUSED:
        options = {OPTIMIZER_OPTION: _adam(value)}
    elif place in LOADER_OPTIONS:
        options = {LOADER_OPTIONS[place]: str(value)}
    elif place != CHECKPOINTING or (value == "every_second" and "--activation_checkpointing" not in offered):
        # Before transformers 5 a Trainer has all layers or none.
        return {}
    elif value == "none":
        options = {"--gradient_checkpointing": "False"}
    else:
        more = {"every_n_layers": 2} if value == "every_second" else {}
        how = json.dumps({**more, "use_reentrant": False})
        options = {"--gradient_checkpointing": "True", "--gradient_checkpointing_kwargs": how}
    return options if options.keys() <= set(offered) else {}
