"""Accelerate in a trial: its plugin and its own accumulation follow the candidate, and it only trains.

`Accelerator()` makes DeepSpeed's configuration from a `DeepSpeedPlugin`, which has a file, a dictionary or fields. The
overrides are merged when the plugin reads it (`huggingface_trainer`), before "auto" values are filled in. The values
that the plugin and the Accelerator keep beside that configuration follow here. If there are several plugins, those that
train follow (`PluginRoles`). In a trial

* `save_state` and `save_model` write nothing, and `load_state` reads nothing. A checkpoint is the user's, and one of
  another ZeRO stage could not be read.
* `init_trackers` starts no tracker, so that `log` and `end_training` reach none.
* A model that is prepared without DeepSpeed ends the trial at once, with the reason.

Each replacement is made when the program imports accelerate. A program without it pays nothing.
"""

import copy
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    DeepSpeedConfig,
    overwrite_deepspeed_config,
    with_open_batch,
)
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.rank.engine_watch import Followers
from zerotune.trial_lib.rank.patching import replace, when_imported
from zerotune.trial_lib.rank.program_facts import ProgramFacts

# Several DeepSpeed plugins: those that train follow a candidate

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
    own: DeepSpeedConfig  # the configuration as the code has it
    overrides: Mapping[str, Any]  # merged into it


def merge_into(config: Any, overrides: Mapping[str, Any]) -> None:
    """Makes an `HfDeepSpeedConfig` follow, as if it had been read so."""
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
    """Decides which plugins follow. `facts` collect the configuration of the first one that trains."""

    def __init__(self, facts: ProgramFacts) -> None:
        self._facts = facts
        self._followers = Followers()
        self._has_trainer = False

    def prepare(self, accelerator: Any, objects: tuple[Any, ...]) -> None:
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
                sections = {name: plugin.deepspeed_config.get(name, {}) for name in ("fp16", "bf16")}
                precision = {name: section for name, section in sections.items() if section.get("enabled") is True}
                self._facts.note_trained_config({**precision, **merged.own})
        else:
            followed = {key: value for key, value in merged.overrides.items() if key == ACCUMULATION}
        withdrawn = {key: value for key, value in merged.overrides.items() if key not in followed}
        _withdraw(plugin.deepspeed_config, overwrite_deepspeed_config(merged.own, {}), withdrawn)
        if MICRO_BATCH in withdrawn and ACCUMULATION in withdrawn and TRAIN_BATCH in merged.own:
            plugin.deepspeed_config[TRAIN_BATCH] = merged.own[TRAIN_BATCH]
        plugin.hf_ds_config.set_stage_and_offload()
        take_fields(plugin)


def _withdraw(config: DeepSpeedConfig, own: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    # Takes overrides out of a configuration again. Other objects hold the configuration as well.
    for key, value in overrides.items():
        inner = config.get(key)
        if isinstance(value, Mapping) and isinstance(inner, dict) and isinstance(own.get(key), Mapping):
            _withdraw(inner, own[key], value)
        elif key in own:
            config[key] = copy.deepcopy(own[key])
        else:
            config.pop(key, None)


def install(facts: ProgramFacts) -> None:
    """Makes Accelerate follow the trial, before the user's program runs."""
    when_imported("accelerate.utils.dataclasses", functools.partial(_follow_in_plugin, facts))
    when_imported("accelerate.accelerator", functools.partial(_only_train, facts))


def adopt() -> None:
    """Makes the plugins that train follow a full experiment's configuration, which all plugins have read."""
    when_imported("accelerate.accelerator", functools.partial(_settle_roles, ProgramFacts()))


def start_over() -> None:
    """Drops the state that all Accelerators of a process share, because the program is run again."""
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def _follow_in_plugin(facts: ProgramFacts, module: ModuleType) -> None:
    def check(original: Callable[..., None], plugin: Any) -> None:
        own = plugin.gradient_accumulation_steps or os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
        original(plugin)
        if str(own).isdecimal():
            facts.batch.setdefault(ACCUMULATION, int(own))
        elif ACCUMULATION not in (facts.ds_config or {ACCUMULATION: "auto"}):
            # If a file does not name it, the plugin's value is 1, whatever the Accelerator's is.
            facts.batch.setdefault(ACCUMULATION, 1)
        take_fields(plugin)

    def set_mixed_precision(original: Callable[..., None], plugin: Any, mixed_precision: str) -> None:
        original(plugin, mixed_precision)
        if facts.ds_config is not None:
            for name in ("fp16", "bf16"):
                section = plugin.deepspeed_config.get(name, {})
                if section.get("enabled") is True:
                    facts.ds_config.setdefault(name, dict(section))

    replace(module.DeepSpeedPlugin, "__post_init__", check)
    replace(module.DeepSpeedPlugin, "set_mixed_precision", set_mixed_precision)


def _only_train(facts: ProgramFacts, module: ModuleType) -> None:
    _settle_roles(facts, module)
    accelerator_class: Any = module.Accelerator

    def prepare(original: Callable[..., Any], accelerator: Any, *objects: Any, **kwargs: Any) -> Any:
        if accelerator.deepspeed_plugin is None:
            _refuse_training_without_deepspeed(objects)
        else:
            import torch

            facts.batch.setdefault(ACCUMULATION, int(accelerator.gradient_accumulation_steps))
            # A dummy for an optimizer that DeepSpeed makes by the configuration is no optimizer of the code's.
            for optimizer in (each for each in objects if isinstance(each, torch.optim.Optimizer)):
                facts.note_optimizer(optimizer, by_accelerate=True)
            if accelerator.split_batches and accelerator.deepspeed_plugin.is_auto(MICRO_BATCH):
                # It gives the engine the size of each rank.
                facts.divided_among = accelerator.num_processes
        return original(accelerator, *objects, **kwargs)

    replace(accelerator_class, "prepare", prepare)
    replace(accelerator_class, "save_state", lambda original, accelerator, output_dir=None, *args, **kwargs: output_dir)
    for name in ("save_model", "load_state", "init_trackers"):
        replace(accelerator_class, name, lambda original, *args, **kwargs: None)


def _settle_roles(facts: ProgramFacts, module: ModuleType) -> None:
    roles = PluginRoles(facts)

    def prepare(original: Callable[..., Any], accelerator: Any, *objects: Any, **kwargs: Any) -> Any:
        roles.prepare(accelerator, objects)
        return original(accelerator, *objects, **kwargs)

    replace(module.Accelerator, "prepare", prepare)


def _refuse_training_without_deepspeed(objects: tuple[Any, ...]) -> None:
    import torch

    kinds = (torch.nn.Module, torch.optim.Optimizer)
    if all(any(isinstance(prepared, kind) for prepared in objects) for kind in kinds):
        raise InputError(
            "Accelerate trains this model without DeepSpeed.",
            where="Accelerator.prepare",
            remedy="Start the program by `accelerate launch --use_deepspeed`, with a configuration file whose "
            "distributed_type is DEEPSPEED, or give Accelerator a DeepSpeedPlugin (and not cpu=True).",
        )
