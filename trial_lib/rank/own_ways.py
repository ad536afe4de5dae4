"""Sees a program that recomputes activations, or compiles, by itself. Its model does not show it before it runs."""

from typing import Any, Protocol

import torch

from trial_lib.messages.turned import CHECKPOINTING, COMPILE


class TurnableFacts(Protocol):
    """As `ProgramProfile` explains them."""

    turnable: dict[str, list[Any]]
    not_turnable: dict[str, str]


_recomputed = False
_NON_REENTRANT = "_checkpoint_without_reentrant_generator"


def watch() -> None:
    """Notes from now on that something is recomputed by torch's functions or DeepSpeed's."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    for owner, name in (
        (torch.utils.checkpoint, _NON_REENTRANT),
        (torch.utils.checkpoint.CheckpointFunction, "forward"),
        (checkpointing.CheckpointFunction, "forward"),
        (checkpointing, "non_reentrant_checkpoint"),
    ):
        original = getattr(owner, name, None)
        if original is not None and not hasattr(original, "__wrapped__"):
            setattr(owner, name, _noted(original, is_method=isinstance(owner, type)))


def note(facts: TurnableFacts, is_compiled: bool) -> None:
    """Takes switches that the program itself turns out of the facts of a run in which ZeroTune has turned nothing."""
    # Whether ZeroTune could turn it as well does not matter then.
    if _recomputed and facts.turnable.get(CHECKPOINTING, ["none"])[0] == "none":
        facts.turnable.pop(CHECKPOINTING, None)
        facts.not_turnable[CHECKPOINTING] = "your code recomputes activations by itself"
    if is_compiled and COMPILE in facts.turnable:
        del facts.turnable[COMPILE]
        facts.not_turnable[COMPILE] = "your code compiles by itself"


def _noted(original: Any, is_method: bool) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        global _recomputed
        _recomputed = True
        return original(*args, **kwargs)

    call.__wrapped__ = original  # type: ignore[attr-defined]
    return staticmethod(call) if is_method else call
