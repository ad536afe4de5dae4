"""What DeepSpeed refuses in a study: by the table of rules, and by facts of the program that the table has not.

Pure: standard library only.
"""

import copy
from collections.abc import Mapping
from typing import Any

from trial_lib.command.switches import deepspeed_part, is_switch, path_of, switches_of
from trial_lib.deepspeed_config.optimizers import steps_where_it_is
from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from trial_lib.deepspeed_config.rules import DeviceName, broken_rules
from trial_lib.space.effects import Surroundings
from trial_lib.space.knobs import STAGE, get_knob, set_knob
from trial_lib.space.known_knobs.layout import is_layout
from trial_lib.space.known_knobs.offload import OFFLOAD_OPTIMIZER

REDUCE_SCATTER = "zero_optimization.reduce_scatter"
# deepspeed/runtime/zero/stage_1_and_2.py _configure_moe_settings
_NEEDED_BY_EXPERTS = {1: (REDUCE_SCATTER,), 2: (REDUCE_SCATTER, "zero_optimization.contiguous_gradients")}
_NOT_WITH_AUTOEP = {
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_gradients": False,
    "sequence_parallel_size": 1,
}
_ZENFLOW = "zero_optimization.zenflow"


class Refusals:
    """What DeepSpeed refuses of candidates, for a reason that does not hold for the user's configuration."""

    def __init__(self, here: Surroundings) -> None:
        """Takes the facts of the study."""
        self._here = here
        self._own = refusals_of(here.base_config, here).keys()
        self._known: dict[str, bool] = {}

    def has(self, knobs: Mapping[str, Any], fine: Mapping[str, Any]) -> bool:
        """Returns whether DeepSpeed refuses a candidate.

        Args:
            knobs: its coarse knobs, in sections.
            fine: fine knobs that change, by path.
        """
        # DeepSpeed reads none of the other switches, so arms that differ in them alone share an answer.
        layouts = [each for each in switches_of(knobs).items() if is_layout(path_of(each[0]), self._here)]
        read = [(path, value) for path, value in fine.items() if not is_switch(path)]
        key = repr((deepspeed_part(knobs), layouts, read))
        if key not in self._known:
            overrides = copy.deepcopy(dict(knobs))
            for path, value in fine.items():
                set_knob(overrides, path, value)
            theirs = refusals_of(overwrite_deepspeed_config(self._here.base_config, overrides), self._here)
            self._known[key] = bool(theirs.keys() - self._own)
        return self._known[key]


def refusals_of(config: Mapping[str, Any], here: Surroundings) -> dict[str, str]:
    """Returns the reasons for which DeepSpeed refuses a configuration here, by the rule's name."""
    device: DeviceName = "cuda" if here.device == "cuda" else "cpu"
    optimizer = "" if here.by_accelerate else here.code_optimizer
    replicas = here.replicas_of(config)
    broken = broken_rules(config, device, here.pipeline, replicas, optimizer, slots=here.slots, shape=here.shape)
    reasons = {rule.name: rule.reason for rule in broken if rule.effect != "ignored"}
    stage = get_knob(config, STAGE, 0)
    if here.has_experts and stage == 3:
        # deepspeed/runtime/engine.py _validate_zero3_moe_compatibility
        if not here.by_autoep:
            reasons["experts_at_stage_3"] = "DeepSpeed's mixture of experts does not go with stage 3."
        elif any(get_knob(config, path, none) not in (none, 0, "auto") for path, none in _NOT_WITH_AUTOEP.items()):
            reasons["autoep_at_stage_3"] = "At stage 3 AutoEP goes neither with ZeRO++ nor with sequence parallelism."
    for key in _NEEDED_BY_EXPERTS.get(stage, ()) if here.has_experts else ():
        if get_knob(config, key, True) is False:
            reasons[f"experts_without_{key}"] = f'DeepSpeed\'s mixture of experts needs "{key}": true at stage {stage}.'
    if here.repeats_backward and (of_repeats := _gradients_of_repeats(config)) != "all":
        reasons[f"keeps_{of_repeats}"] = (
            "The program calls backward more than once for one step. Of such gradients DeepSpeed loses some at ZeRO "
            "stages 1 and 2, and adds up all of them at stages 0 and 3."
        )
    elif here.repeats_backward and _gradients_of_repeats(here.base_config) != "all":
        reasons["keeps_all"] = (
            "The program calls backward more than once for one step. At your ZeRO stage DeepSpeed loses some of those "
            "gradients, and here it adds up all of them, so the training would change."
        )
    if get_knob(config, _ZENFLOW) is not None and (stage == 0 or get_knob(config, OFFLOAD_OPTIMIZER) != "cpu"):
        # deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py; at stage 0 the engine has no such optimizer.
        reasons["zenflow_without_offload"] = "ZenFlow works with an optimizer that is offloaded to the CPU."
    is_offloaded = stage != 0 and get_knob(config, OFFLOAD_OPTIMIZER) in ("cpu", "nvme")
    if not steps_where_it_is(here.code_optimizer, here.device, is_offloaded):
        place = "offloaded" if is_offloaded else "without offload"
        reasons["optimizer_where_it_cannot_step"] = f"{here.code_optimizer} cannot step {place}."
    return reasons


def _gradients_of_repeats(config: Mapping[str, Any]) -> str:
    """Returns the gradients that DeepSpeed keeps if backward is called again for one step.

    See `trial_lib/measure/backward_passes.py`. Offload changes them.
    """
    if get_knob(config, STAGE, 0) not in (1, 2):
        return "all"
    return "some" if get_knob(config, OFFLOAD_OPTIMIZER) in ("cpu", "nvme") else "the_last"
