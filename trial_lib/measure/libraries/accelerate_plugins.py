"""An Accelerator of several DeepSpeed plugins. Those that train follow a candidate, and the others do not.

A plugin reads its configuration when it is made, long before the code shows its purpose. Code may make a model by it at
once. So every configuration follows at first. If a plugin's model is then prepared without an optimizer, as a teacher's
is, the plugin gets its own configuration back. It keeps only the accumulation, because that is the Accelerator's as
well.
"""

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    DeepSpeedConfig,
    overwrite_deepspeed_config,
    with_open_batch,
)
from trial_lib.measure.engine_roles import Followers
from trial_lib.measure.program_facts import ProgramFacts

# Values that a plugin keeps beside the configuration, with their places in it.
_FIELDS = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": ACCUMULATION,
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
}

_MERGED = "zerotune_merged"


@dataclass(frozen=True)
class _Merged:
    """The merge into a configuration.

    Attributes:
        own: the configuration as the code has it.
        overrides: merged into it.
    """

    own: DeepSpeedConfig
    overrides: Mapping[str, Any]


def merge_into(config: Any, overrides: Mapping[str, Any]) -> None:
    """Makes an `HfDeepSpeedConfig` follow, as if it had been read so.

    Args:
        config: the configuration.
        overrides: for it.
    """
    setattr(config, _MERGED, _Merged(copy.deepcopy(config.config), copy.deepcopy(dict(overrides))))
    config.config = with_open_batch(overwrite_deepspeed_config(config.config, overrides), config.config)
    config.set_stage_and_offload()


def take_fields(plugin: Any) -> None:
    """Sets the values that a plugin keeps beside its configuration to those in the configuration."""
    for name, key in _FIELDS.items():
        value = plugin.hf_ds_config.get_value(key)
        if value is not None and value != "auto":
            setattr(plugin, name, value)


class PluginRoles:
    """Decides which of the plugins follow.

    Args:
        facts: collect the configuration of the first one that trains.
    """

    def __init__(self, facts: ProgramFacts) -> None:
        self._facts = facts
        self._followers = Followers()
        self._has_trainer = False

    def prepare(self, accelerator: Any, objects: tuple[Any, ...]) -> None:
        """Makes the selected plugin follow or not, before the Accelerator prepares objects with it."""
        import torch

        plugins = accelerator.state.deepspeed_plugins
        if not isinstance(plugins, dict) or len(plugins) < 2:
            return
        plugin = accelerator.deepspeed_plugin
        merged: _Merged | None = getattr(plugin.hf_ds_config, _MERGED, None)
        if merged is None or not any(isinstance(each, torch.nn.Module) for each in objects):
            return
        setattr(plugin.hf_ds_config, _MERGED, None)
        # A dummy for an optimizer that DeepSpeed makes.
        optimizers = (torch.optim.Optimizer, sys.modules["accelerate.utils"].DummyOptim)
        if any(isinstance(each, optimizers) for each in objects):
            followed = self._followers.overrides_for(merged.own, merged.overrides)
            if not self._has_trainer:
                self._has_trainer = True
                self._facts.note_trained_config(_with_precision(merged.own, plugin.deepspeed_config))
        else:
            followed = {key: value for key, value in merged.overrides.items() if key == ACCUMULATION}
        withdrawn = {key: value for key, value in merged.overrides.items() if key not in followed}
        _withdraw(plugin.deepspeed_config, overwrite_deepspeed_config(merged.own, {}), withdrawn)
        if MICRO_BATCH in withdrawn and ACCUMULATION in withdrawn and TRAIN_BATCH in merged.own:
            plugin.deepspeed_config[TRAIN_BATCH] = merged.own[TRAIN_BATCH]
        plugin.hf_ds_config.set_stage_and_offload()
        take_fields(plugin)


def _with_precision(own: DeepSpeedConfig, config: DeepSpeedConfig) -> DeepSpeedConfig:
    """Returns the code's configuration, with the precision that the code passes to the Accelerator beside it."""
    sections = {name: config.get(name, {}) for name in ("fp16", "bf16")}
    return {**{name: section for name, section in sections.items() if section.get("enabled") is True}, **own}


def _withdraw(config: DeepSpeedConfig, own: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Takes overrides out of a configuration again. Other objects hold the configuration as well."""
    for key, value in overrides.items():
        inner = config.get(key)
        if isinstance(value, Mapping) and isinstance(inner, dict) and isinstance(own.get(key), Mapping):
            _withdraw(inner, own[key], value)
        elif key in own:
            config[key] = copy.deepcopy(own[key])
        else:
            config.pop(key, None)
