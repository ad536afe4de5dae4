"""The layout: how many ranks hold one replica of the model together."""

from collections.abc import Iterable
from typing import Any

from trial_lib.deepspeed_config.layout import AUTOTP
from trial_lib.deepspeed_config.rules import broken_rules
from trial_lib.space.effects import Effect, KnownKnob, Surroundings

_UNDIVIDED = ("undivided_devices", "undivided_heads")


def _tensor_sizes(here: Surroundings, own: Any) -> tuple[int, ...]:
    """Returns the sizes of tensor-parallel groups to try: the user's, and its divisors.

    Without a request they are tried only if the user trains so. On a node of 8 GPUs a group is never faster by itself
    (huggingface.co/spaces/nanotron/ultrascale-playbook), and a script may feed its ranks different batches.
    """
    if not isinstance(own, int) or own <= 1:
        return ()
    return (own, *(size for size in range(1, own) if own % size == 0 and not undivided(size, here)))


def undivided(size: int, here: Surroundings) -> str:
    """Returns why tensor-parallel groups of a size are not tried; empty if they divide the devices and the heads."""
    config = {"tensor_parallel": {"autotp_size": size}}
    broken = broken_rules(config, "cpu", None, None, slots=here.slots, head_counts=here.head_counts)
    return next((rule.reason for rule in broken if rule.name in _UNDIVIDED), "")


def layouts_not_tried(sizes: Iterable[int], here: Surroundings) -> list[str]:
    """Returns one sentence for each requested size of tensor-parallel groups that is not tried."""
    reasons = {size: undivided(size, here) for size in sizes}
    return [f"{AUTOTP} {size} is not tried: {reason}" for size, reason in reasons.items() if reason]


LAYOUT: dict[str, KnownKnob] = {
    AUTOTP: KnownKnob(
        "size",
        (
            Effect(
                "engine.py _configure_tensor_parallel",
                holds=lambda here: not here.pipeline,
                otherwise="AutoTP does not divide the stages of a pipeline",
                candidates=_tensor_sizes,
            ),
        ),
        default=1,
        is_coarse=True,
        since="0.16.4",
    ),
}
