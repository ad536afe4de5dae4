"""Switches that ZeroTune turns in the user's model around `deepspeed.initialize`."""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from zerotune.trial_lib.messages.turned import ATTENTION, CHECKPOINTING, COMPILE, TURNED
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.recomputation import GuardedCheckpoint, repeated_blocks
from zerotune.trial_lib.rank.torch_functions import watch_recomputation

# The attribute by which a wrapper has the model: torch.compile, PEFT's two layers, DDP, Lightning and users' own.
_INNER = ("_orig_mod", "base_model", "module", "model")
_MOST_WRAPPERS = 6


def inner_model(model: Any) -> Any:
    """The Hugging Face model within wrappers; without one, the given model."""
    found = model
    for _ in range(_MOST_WRAPPERS):
        if hasattr(type(found), "set_attn_implementation") or hasattr(type(found), "gradient_checkpointing_enable"):
            return found
        inner = next((part for name in _INNER if (part := vars(found).get("_modules", {}).get(name)) is not None), None)
        if inner is None:
            return model
        found = inner
    return model


@dataclass(frozen=True)
class Found:
    """The values that a switch can have in one program."""

    values: tuple[Any, ...] = ()  # the program's own first. Empty if ZeroTune cannot turn the switch.
    reason: str = ""  # why it cannot, in words that follow "has no effect: "

    @classmethod
    def of(cls, own: Any, values: tuple[Any, ...]) -> "Found":
        return cls((own, *(value for value in values if value != own)))


# Activation checkpointing of a model: none, of all its repeated blocks, or of every second one.

NONE, FULL, EVERY_SECOND = "none", "full", "every_second"
_BY_ITSELF = "your code recomputes activations by itself"
_NO_BLOCKS = "the model has no repeated blocks of several operations"
_STATISTICS = "the repeated blocks keep statistics of their batches, which recomputation counts twice"


def find_checkpointing(model: Any) -> Found:
    """The kinds of checkpointing that a model can have, its own first."""
    own = inner_model(model)
    if _has_method(own):
        flags = [bool(module.gradient_checkpointing) for module in _flagged(own)]
        mine = NONE if not any(flags) else FULL if all(flags) else EVERY_SECOND
        return Found.of(mine, (NONE, FULL, EVERY_SECOND))
    if hasattr(model, "activation_checkpoint_interval"):
        return Found(reason="a pipeline has its own activation_checkpoint_interval")
    if any(isinstance(module, CheckpointWrapper) or _is_recomputed(module) for module in model.modules()):
        return Found(reason=_BY_ITSELF)
    _, reason = _recomputable(model)
    return Found(reason=reason) if reason else Found.of(NONE, (NONE, FULL, EVERY_SECOND))


def turn_checkpointing(model: Any, kind: str) -> None:
    """Gives a model another kind of checkpointing before its engine exists. ValueError without worthwhile blocks."""
    own = inner_model(model)
    if not _has_method(own):
        blocks, reason = _recomputable(model)
        if not blocks:
            raise ValueError(f"Its activations cannot be recomputed: {reason}.")
        guarded = GuardedCheckpoint()
        for block in _of_kind(blocks, kind):
            # A copy of the model gets a copy of this, which calls the copied block.
            block.forward = functools.partial(guarded, block, block.forward)
    elif find_checkpointing(model).values[0] != kind:
        # The newer name (transformers 5) warns of the older one, and means the same.
        of_transformers_5 = hasattr(own, "activation_checkpointing_enable")
        name = "activation_checkpointing" if of_transformers_5 else "gradient_checkpointing"
        if kind == NONE:
            getattr(own, f"{name}_disable")()
            return
        getattr(own, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
        layers = [module for module in _flagged(own) if not any(_flagged(child) for child in module.children())]
        for layer in set(layers) - set(_of_kind(layers, kind)):
            layer.gradient_checkpointing = False


def _recomputable(model: Any) -> tuple[list[Any], str]:
    blocks = repeated_blocks(model)
    found = [block for block in blocks if all(getattr(each, "running_mean", None) is None for each in block.modules())]
    return found, "" if found else _STATISTICS if blocks else _NO_BLOCKS


def _of_kind(blocks: list[Any], kind: str) -> list[Any]:
    return {NONE: [], FULL: blocks, EVERY_SECOND: blocks[::2]}[kind]


def _is_recomputed(module: Any) -> bool:
    # Whether `turn_checkpointing` has given a module its forward pass.
    return isinstance(getattr(vars(module).get("forward"), "func", None), GuardedCheckpoint)


def _has_method(model: Any) -> bool:
    return bool(getattr(model, "supports_gradient_checkpointing", False)) and hasattr(
        model, "gradient_checkpointing_enable"
    )


def _flagged(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


# The attention implementation of a Hugging Face model.

# The attribute of a model's class that says whether it can have an implementation. The older name is that of
# transformers before 4.53.
_SAYS = {"sdpa": ("_supports_sdpa",), "flash_attention_2": ("_supports_flash_attn", "_supports_flash_attn_2")}


def find_attention(model: Any) -> Found:
    """The implementations that a model can have, its own first."""
    model = inner_model(model)
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(own, str):
        return Found(reason="the model is none of Hugging Face's")
    if not _can_change(model):
        return Found(reason=f"{type(model).__name__} chooses its attention when it is made")
    values = tuple(name for name in TURNED[ATTENTION].values if name == "eager" or _supports(model, name))
    return Found.of(own, values) if own in values else Found(reason=f"its attention is {own}, which ZeroTune leaves")


def turn_attention(model: Any, name: str) -> None:
    """Gives a model another implementation. ValueError if transformers refuses it, or keeps another one."""
    model = inner_model(model)
    if model.config._attn_implementation == name:
        return
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} keeps the attention {model.config._attn_implementation}.")


def _can_change(model: Any) -> bool:
    # Whether the layers ask for the implementation in each forward pass (transformers from 4.48 on).
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


# `torch.compile` of a model, by `engine.compile()`.

_COMPILERS = ("g++", "clang++")


def find_compiled(model: Any) -> Found:
    """Whether a model is compiled, and whether it can be."""
    if hasattr(model, "activation_checkpoint_interval"):
        return Found(reason="the engine of a pipeline is not compiled")
    if hasattr(model, "_orig_mod") or any(_is_compiled(module) for module in model.modules()):
        return Found(reason="your code compiles its model by itself")
    if missing := _missing():
        return Found(reason=f"torch.compile needs {missing}")
    return Found.of(False, (False, True))


def _is_compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _missing() -> str:
    # The compiler that inductor would not find; empty if there is one. A foreseen run compiles nothing, and its device
    # has the compilers of another host.
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().device_name()
    if device not in ("cpu", "cuda"):
        return ""
    if device == "cpu":
        found = any(map(shutil.which, (os.environ.get("CXX", _COMPILERS[0]), *_COMPILERS)))
        return "" if found else "a C++ compiler such as g++"
    return "" if importlib.util.find_spec("triton") is not None else "triton"


# All switches of a candidate


@dataclass(frozen=True)
class _Way:
    """How a switch is found and turned."""

    # Returns the values that a model can have, the program's own first, or the reason why it has none
    find: Callable[[Any], Found]
    # Turns it in a model, before the engine exists. None for a switch that an engine has.
    before: Callable[[Any, Any], None] | None = None
    after: Callable[[Any, Any], None] | None = None  # turns it in an engine. None for a switch that a model has.


# In this order: blocks are wrapped before the whole is compiled.
_WAYS: dict[str, _Way] = {
    ATTENTION: _Way(find_attention, before=turn_attention),
    CHECKPOINTING: _Way(find_checkpointing, before=turn_checkpointing),
    # The first step of the engine then pays for it.
    COMPILE: _Way(find_compiled, after=lambda engine, is_on: engine.compile() if is_on else None),
}


class Turning:
    """The switches of one candidate, the others staying as in the program. `facts` record those of its first engine."""

    def __init__(self, wanted: Mapping[str, Any] | None, facts: ProgramFacts | None = None) -> None:
        self._wanted = dict(wanted or {})
        self._facts = facts

    def before(self, arguments: dict[str, Any]) -> None:
        model = arguments.get("model")
        if model is None:
            return
        facts = self._facts
        if facts is not None and not _WAYS.keys() & (facts.turnable.keys() | facts.not_turnable.keys()):
            if not self._wanted:
                watch_recomputation()
            for place, way in _WAYS.items():
                found = way.find(model)
                if found.values:
                    facts.turnable[place] = list(found.values)
                else:
                    facts.not_turnable[place] = found.reason
        for place, way in _WAYS.items():
            if place in self._wanted and way.before is not None:
                way.before(model, self._wanted[place])

    def after(self, engine: Any) -> None:
        for place, way in _WAYS.items():
            if place in self._wanted and way.after is not None:
                way.after(engine, self._wanted[place])
