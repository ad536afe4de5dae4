"""Activation checkpointing of a model: none, of all its repeated blocks, or of every second one.

A Hugging Face model has a method of its own. In any other model, the repeated blocks get a forward pass that torch
recomputes. No module is added, so checkpoints have the names of the plain program. Both keep the state of random
numbers, so dropout draws the same again.
"""

import functools
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from trial_lib.turned.found import Found
from trial_lib.turned.models import inner_model
from trial_lib.turned.recomputed_alike import GuardedCheckpoint
from trial_lib.turned.repeated_blocks import repeated_blocks

NONE, FULL, EVERY_SECOND = "none", "full", "every_second"
_BY_ITSELF = "your code recomputes activations by itself"
_NO_BLOCKS = "the model has no repeated blocks of several operations"
_STATISTICS = "the repeated blocks keep statistics of their batches, which recomputation counts twice"


def find(model: Any) -> Found:
    """Returns the kinds of checkpointing that a model can have, its own first."""
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


def turn(model: Any, kind: str) -> None:
    """Gives a model another kind of checkpointing. Call it before its engine exists.

    Raises:
        ValueError: the model has no blocks that are worth it.
    """
    own = inner_model(model)
    if not _has_method(own):
        blocks, reason = _recomputable(model)
        if not blocks:
            raise ValueError(f"Its activations cannot be recomputed: {reason}.")
        guarded = GuardedCheckpoint()
        for block in _of_kind(blocks, kind):
            # A copy of the model gets a copy of this, which calls the copied block.
            block.forward = functools.partial(guarded, block, block.forward)
    elif find(model).values[0] != kind:
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
    """Returns the blocks that can be recomputed, and why there are none."""
    blocks = repeated_blocks(model)
    found = [block for block in blocks if not any(map(_keeps_statistics, block.modules()))]
    return found, "" if found else _STATISTICS if blocks else _NO_BLOCKS


def _of_kind(blocks: list[Any], kind: str) -> list[Any]:
    return {NONE: [], FULL: blocks, EVERY_SECOND: blocks[::2]}[kind]


def _is_recomputed(module: Any) -> bool:
    """Returns whether `turn` has given a module its forward pass."""
    return isinstance(getattr(vars(module).get("forward"), "func", None), GuardedCheckpoint)


def _has_method(model: Any) -> bool:
    return bool(getattr(model, "supports_gradient_checkpointing", False)) and hasattr(
        model, "gradient_checkpointing_enable"
    )


def _flagged(model: Any) -> list[Any]:
    """Returns the modules that a Hugging Face model's method switches."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def _keeps_statistics(module: Any) -> bool:
    """Returns whether a module changes buffers in its forward pass, as BatchNorm does."""
    return getattr(module, "running_mean", None) is not None
