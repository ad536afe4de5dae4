"""The layout: how many ranks hold one replica of the model together."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from trial_lib.command.switches import is_switch, place_of
from trial_lib.deepspeed_config.layout import AUTOEP, AUTOTP, LAYOUTS, PROGRAM, SEQUENCE, Layout
from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from trial_lib.deepspeed_config.rules import broken_rules
from trial_lib.space.effects import Effect, KnownKnob, Surroundings
from trial_lib.space.knobs import set_knob

_IMPOSSIBLE = (
    "undivided_devices",
    "undivided_heads",
    "unshared_heads",
    "unshared_tokens",
    "empty_stages",
    "undivided_experts",
    "pipeline_with_zero_2_or_3",
)


def _tensor_sizes(here: Surroundings, own: Any) -> tuple[int, ...]:
    """Returns the sizes of tensor-parallel groups to try: the user's, and its divisors.

    Without a request they are tried only if the user trains so. On a node of 8 GPUs a group is never faster by itself
    (huggingface.co/spaces/nanotron/ultrascale-playbook), and a script may feed its ranks different batches.
    """
    if not isinstance(own, int) or own <= 1:
        return ()
    return (own, *(size for size in range(1, own) if own % size == 0 and not undivided(AUTOTP, size, here)))


def is_layout(path: str, here: Surroundings) -> bool:
    """Returns whether a knob is the size of groups, by its path: of DeepSpeed, or a switch that the user calls so."""
    kinds = here.base_config.get(LAYOUTS) or {}
    return path in (AUTOTP, SEQUENCE, AUTOEP) or (is_switch(path) and place_of(path) in kinds)


def undivided(path: str, size: Any, here: Surroundings) -> str:
    """Returns why groups of a size are not tried by themselves; empty if they divide devices and model.

    Args:
        path: of the knob.
        size: its value.
        here: the other facts.
    """
    alone: dict[str, Any] = {LAYOUTS: here.base_config.get(LAYOUTS) or {}}
    set_knob(alone, path, size)
    return next(iter(_reasons(alone, here)), "")


def undivided_together(knobs: Mapping[str, Any], here: Surroundings) -> str:
    """Returns why the groups of some knobs are not tried together; empty if they are, or if they are the user's."""
    kinds = here.base_config.get(LAYOUTS) or {}
    base = Layout.of(here.base_config)
    if base.changed(knobs, kinds) == base:
        return ""
    own = {PROGRAM: here.base_config.get(PROGRAM) or {}, LAYOUTS: kinds}
    for section in ("tensor_parallel", "expert_parallel", SEQUENCE):
        if section in here.base_config:
            own[section] = here.base_config[section]
    return next(iter(_reasons(overwrite_deepspeed_config(own, copy.deepcopy(dict(knobs))), here)), "")


def _reasons(config: Mapping[str, Any], here: Surroundings) -> Iterable[str]:
    broken = broken_rules(config, "cpu", None, None, slots=here.slots, shape=here.shape)
    return (rule.reason for rule in broken if rule.name in _IMPOSSIBLE)


def _of_groups(source: str, devices: tuple[str, ...] = ("cpu", "cuda"), **when: tuple[Any, ...]) -> tuple[Effect, ...]:
    """Returns an effect that takes tensor-parallel groups, under settings beside their size."""
    beside = {f"tensor_parallel.{key}": values for key, values in when.items()}
    return (Effect(source, devices=devices, when=beside, unless={AUTOTP: (0, 1)}),)


def layouts_not_tried(asked: Mapping[str, Iterable[Any]], here: Surroundings) -> list[str]:
    """Returns one sentence for each requested size of groups that is not tried.

    Args:
        asked: the requested values of each knob, by its path.
        here: the other facts.
    """
    reasons = {
        f"{place_of(path)} {size}": undivided(path, size, here)
        for path, sizes in asked.items()
        if is_layout(path, here)
        for size in sizes
        if size is not None
    }
    return [f"{name} is not tried: {reason}" for name, reason in reasons.items() if reason]


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
    # DeepSpeed 0.19.8 sums a layer's gradients of the bias over the first dimension alone, so a bias ends the trial.
    "tensor_parallel.tp_overlap_comm": KnownKnob(
        "switch",
        _of_groups("../module_inject/layers.py AsyncColumnParallel"),
        since="0.16.6",
        word="tp-overlap",
    ),
    # It takes a `lm_head` and the loss of transformers. Without a value DeepSpeed divides a head that shares its
    # weights with the embedding, if the model's own plan says so.
    "tensor_parallel.vocab_parallel_lm_head": KnownKnob(
        "switch",
        _of_groups("engine.py finalize_autotp"),
        is_coarse=True,
        since="0.19.8",
    ),
    "tensor_parallel.vocab_parallel_ce_backend": KnownKnob(
        ("torch", "liger"),
        _of_groups("../sequence/cross_entropy.py _liger_can_run", ("cuda",), vocab_parallel_lm_head=(True,)),
        default="torch",
        is_coarse=True,
        since="0.19.8",
    ),
    # Each rank has a batch of its own, and its share of the experts.
    AUTOEP: KnownKnob(
        "size",
        (Effect("engine.py _configure_expert_parallel", when={"expert_parallel.enabled": (True,)}),),
        default=1,
        is_coarse=True,
        since="0.19.2",
    ),
}
