"""Accelerate and the Hugging Face Trainer in a trial: they follow the candidate, and only train.

`Accelerator()` makes DeepSpeed's configuration from a `DeepSpeedPlugin`, which has a file, a dictionary or fields. An
unmodified Trainer script passes the configuration to `TrainingArguments`, or lets `accelerate launch` do so. Both fill
in "auto" values. The overrides are merged when the configuration is read, before that. The values that the plugin, the
Accelerator and `TrainingArguments` keep beside it follow as well. If there are several plugins, those that train follow
(`PluginRoles`). In a trial

* The Trainer's batch arguments are the candidate's. With `split_batches` all ranks divide a batch of the argument's
  size. The engine gets the size of each rank then, and not the argument, as in a plain run.
* `output_dir` is a folder of the trial's own. The Trainer finds no last checkpoint of the user's in it, and overwrites
  none.
* Nothing is evaluated, pushed to a hub, reported to a tracker or resumed. `save_state` and `save_model` write nothing,
  and `load_state` reads nothing: a checkpoint is the user's, and one of another ZeRO stage could not be read.
* A model or a tokenizer that the program saves before its first step is saved, because the program may read it back.
  `UserFiles` gives the folder, so that nothing of the user's changes. Later the program saves nothing.
* Training goes on until the trial has measured enough. A model that Accelerate prepares without DeepSpeed ends the
  trial at once, with the reason.

Each replacement is made when the program imports its module. A program without it pays nothing.
"""

import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    TRAINING_ARGUMENTS,
    DeepSpeedConfig,
    difference,
    overwrite_deepspeed_config,
    with_open_batch,
    with_typed_sizes,
)
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.turned import TRAINER_OPTIONS
from zerotune.trial_lib.rank import without_deepspeed
from zerotune.trial_lib.rank.engine_watch import Followers
from zerotune.trial_lib.rank.patching import put, replace, when_imported
from zerotune.trial_lib.rank.program_facts import ProgramFacts

# Accelerate in a trial: its plugin and its own accumulation follow the candidate, and it only trains.


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
            facts.found.batch.setdefault(ACCUMULATION, int(own))
        elif ACCUMULATION not in (facts.found.ds_config or {ACCUMULATION: "auto"}):
            # If a file does not name it, the plugin's value is 1, whatever the Accelerator's is.
            facts.found.batch.setdefault(ACCUMULATION, 1)
        take_fields(plugin)

    def set_mixed_precision(original: Callable[..., None], plugin: Any, mixed_precision: str) -> None:
        original(plugin, mixed_precision)
        if facts.found.ds_config is not None:
            for name in ("fp16", "bf16"):
                section = plugin.deepspeed_config.get(name, {})
                if section.get("enabled") is True:
                    facts.found.ds_config.setdefault(name, dict(section))

    replace(module.DeepSpeedPlugin, "__post_init__", check)
    replace(module.DeepSpeedPlugin, "set_mixed_precision", set_mixed_precision)


def _only_train(facts: ProgramFacts, needs_deepspeed: bool, module: ModuleType) -> None:
    _settle_roles(facts, module)
    accelerator_class: Any = module.Accelerator

    def prepare(original: Callable[..., Any], accelerator: Any, *objects: Any, **kwargs: Any) -> Any:
        if accelerator.deepspeed_plugin is None and needs_deepspeed:
            _refuse_training_without_deepspeed(objects)
        elif accelerator.deepspeed_plugin is not None:
            import torch

            facts.found.batch.setdefault(ACCUMULATION, int(accelerator.gradient_accumulation_steps))
            # A dummy for an optimizer that DeepSpeed makes by the configuration is no optimizer of the code's.
            for optimizer in (each for each in objects if isinstance(each, torch.optim.Optimizer)):
                facts.note_optimizer(optimizer, by_accelerate=True)
            if accelerator.split_batches and accelerator.deepspeed_plugin.is_auto(MICRO_BATCH):
                # It gives the engine the size of each rank.
                facts.note(divided_among=accelerator.num_processes)
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


# The Hugging Face Trainer in a trial: its arguments follow the candidate, and it only trains.


# Nothing is uploaded to Hugging Face's hub, and no repository is created there

_ASKS = "push_to_hub"


def _upload_nothing(module: ModuleType) -> None:
    owner: type[Any] = module.PushToHubMixin
    before = vars(owner).get("__init_subclass__")

    def init_subclass(cls: type, /, **kwargs: Any) -> None:
        if before is None:
            super(owner, cls).__init_subclass__(**kwargs)
        else:
            before.__func__(cls, **kwargs)
        _only_save(cls)

    put(owner, "__init_subclass__", classmethod(init_subclass))
    # The fork server may have imported classes already.
    for each in (owner, *_below(owner)):
        _only_save(each)
    # For a `save_pretrained` that reads its arguments in another way. Older versions of transformers have the second.
    _replace(owner, "_upload_modified_files", lambda original: lambda *args, **kwargs: None)
    _replace(owner, "_create_repo", lambda original: lambda self, repo_id, *args, **kwargs: repo_id)


def _below(owner: type[Any]) -> Iterator[type[Any]]:
    for each in owner.__subclasses__():
        yield each
        yield from _below(each)


def _only_save(owner: type) -> None:
    # Makes the methods that a class itself defines save without an upload.
    _replace(owner, "save_pretrained", _without_push)
    # Some classes have a copy of their own.
    _replace(owner, _ASKS, lambda original: lambda *args, **kwargs: None)


def _without_push(original: Callable[..., Any]) -> Callable[..., Any]:
    # A method that gets no `push_to_hub`, which callers give by position or by name.
    names = list(inspect.signature(original).parameters)
    place = names.index(_ASKS) if _ASKS in names else None

    def save(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(_ASKS, None)
        if place is not None and len(args) > place:
            args = (*args[:place], False, *args[place + 1 :])
        return original(*args, **kwargs)

    return save


def _replace(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = vars(owner).get(name)
    if inspect.isfunction(original):
        put(owner, name, functools.wraps(original)(wrap(original)))


# Training ends with the trial, long before this many optimizer steps.
_STEPS = 1_000_000
# The attribute of a Trainer with its own number of optimizer steps, or with `max_steps` before that number is known.
_LENGTH = "zerotune_length"

# Takes a folder that the program names, and returns the one to save into.
_ToSave = Callable[[str | os.PathLike[str]], str | os.PathLike[str] | None]

# They follow from the number of steps, which is not the user's in a trial.
_OF_THE_LENGTH = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")


def install(
    facts: ProgramFacts,
    overrides: Mapping[str, Any],
    scratch: Path,
    to_save: _ToSave,
    to_save_model: _ToSave,
    beside: str = "",
    observer: Any = None,
) -> None:
    """Makes transformers, Accelerate and PEFT follow the trial, before the program runs.

    `to_save` returns the folder that takes a tokenizer now, in place of the program's, or None if the program may not
    save it. `to_save_model` does the same for a model. `beside` takes DeepSpeed's place, and is empty if DeepSpeed
    trains. Its `observer` is the probe.
    """
    when_imported("accelerate.utils.deepspeed", functools.partial(_merge_into_configurations, facts, overrides))
    when_imported("transformers.integrations.deepspeed", functools.partial(_check_in_a_trial, facts, overrides))
    when_imported("transformers.training_args", functools.partial(_follow_in_arguments, facts, overrides, scratch))
    when_imported("transformers.hf_argparser", functools.partial(_find_flags, facts))
    when_imported("transformers.trainer_callback", _neither_save_nor_evaluate)
    when_imported("transformers.trainer", _train_only)
    when_imported("transformers.modeling_utils", lambda module: _save_where(to_save_model, module.PreTrainedModel))
    when_imported(
        "transformers.tokenization_utils_base", lambda module: _save_where(to_save, module.PreTrainedTokenizerBase)
    )
    when_imported("transformers.utils.hub", _upload_nothing)
    when_imported("peft.peft_model", lambda module: _save_where(to_save_model, module.PeftModel))
    when_imported("accelerate.utils.dataclasses", functools.partial(_follow_in_plugin, facts))
    when_imported("accelerate.accelerator", functools.partial(_only_train, facts, not beside))
    if beside:
        without_deepspeed.install(beside, overrides, observer)


def adopt(ds_config: Mapping[str, Any], is_in_code: bool) -> None:
    """Makes the Trainer train at full length with a complete configuration, and with arguments that agree with it.

    If the program's own configuration is in its code, the differences are merged into that.
    """
    when_imported("transformers.training_args", functools.partial(_take_batch, ds_config))
    if is_in_code:
        when_imported("accelerate.utils.deepspeed", functools.partial(_merge_difference, ds_config))
        # The plugins that train follow the experiment's configuration, which all plugins have read.
        when_imported("accelerate.accelerator", functools.partial(_settle_roles, ProgramFacts()))


def _take_batch(ds_config: Mapping[str, Any], module: ModuleType) -> None:
    def check(original: Callable[..., None], arguments: Any) -> None:
        for key, name in TRAINING_ARGUMENTS.items():
            if ds_config.get(key, "auto") != "auto":
                setattr(arguments, name, ds_config[key])
        original(arguments)

    replace(module.TrainingArguments, "__post_init__", check)


def _merge_difference(ds_config: Mapping[str, Any], module: ModuleType) -> None:
    def read(original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
        original(config, *args, **kwargs)
        merge_into(config, difference(config.config, ds_config))

    replace(module.HfDeepSpeedConfig, "__init__", read)


def _merge_into_configurations(facts: ProgramFacts, overrides: Mapping[str, Any], module: ModuleType) -> None:
    # Merges the overrides into a configuration before the stage or an "auto" value in it is read.

    def read(original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
        original(config, *args, **kwargs)
        facts.note_config(config.config)
        merge_into(config, overrides)

    replace(module.HfDeepSpeedConfig, "__init__", read)


def _check_in_a_trial(facts: ProgramFacts, overrides: Mapping[str, Any], module: ModuleType) -> None:
    # Makes the Trainer compare its arguments with a configuration, except for the training's length.

    def process(original: Callable[..., None], config: Any, arguments: Any, *args: Any, **kwargs: Any) -> None:
        ranks = int(os.environ["WORLD_SIZE"])
        if ranks > arguments.world_size == 1:
            # Its batch would not be DeepSpeed's, and each rank would train on the same samples.
            raise ValueError(
                f"The Trainer counts one rank instead of {ranks}. Without a GPU, give it --use_cpu "
                "(use_cpu=True in code)."
            )
        # Older versions of transformers have no such argument.
        if not getattr(getattr(arguments, "accelerator_config", None), "split_batches", False):
            original(config, arguments, *args, **kwargs)
            return
        if facts.found.divided_among == 1:
            facts.note(divided_among=ranks)
            facts.found.batch[MICRO_BATCH] //= ranks
        sizes = config.config
        if MICRO_BATCH in overrides:
            # The candidate's sizes are those of a rank, and the Trainer compares its argument with them.
            arguments.per_device_train_batch_size = overrides[MICRO_BATCH] * ranks
            sizes.update(with_typed_sizes(sizes, ranks))
        original(config, arguments, *args, **kwargs)
        sizes.update({key: sizes[key] // ranks for key in (MICRO_BATCH, TRAIN_BATCH) if key in sizes})

    def fill(original: Any, config: Any, key: str, value: Any, name: Any = None, must_match: bool = True) -> None:
        original(config, key, value, name, must_match and key not in _OF_THE_LENGTH)

    replace(module.HfTrainerDeepSpeedConfig, "trainer_config_process", process)
    replace(module.HfTrainerDeepSpeedConfig, "fill_match", fill)


def _follow_in_arguments(facts: ProgramFacts, overrides: Mapping[str, Any], scratch: Path, module: ModuleType) -> None:
    def check(original: Callable[..., None], arguments: Any) -> None:
        for key, name in TRAINING_ARGUMENTS.items():
            # Only the first time, because copies of arguments have the candidate's values already.
            facts.found.batch.setdefault(key, int(getattr(arguments, name)))
            if key in overrides:
                setattr(arguments, name, overrides[key])
        if getattr(arguments, "per_gpu_train_batch_size", None):
            # The older name, which has precedence in versions of transformers that still have it.
            arguments.per_gpu_train_batch_size = None
        arguments.output_dir = str(scratch / "output")
        arguments.auto_find_batch_size = arguments.push_to_hub = arguments.eval_on_start = False
        original(arguments)
        arguments.report_to = []

    replace(module.TrainingArguments, "__post_init__", check)


def _find_flags(facts: ProgramFacts, module: ModuleType) -> None:
    # Records the flags that set the batch, if the training arguments come from the command line.

    def parse(
        original: Callable[..., Any], parser: Any, args: Sequence[str] | None = None, *more: Any, **kwargs: Any
    ) -> Any:
        if _are_of_the_command_line(args):
            names = set(parser._option_string_actions)
            facts.note(trainer_options=sorted(names & set(TRAINER_OPTIONS)))
            for key, name in TRAINING_ARGUMENTS.items():
                # The flag as the user has typed it: transformers accepts dashes for underscores.
                dashed = f"--{name.replace('_', '-')}"
                flag = dashed if any(word.split("=")[0] == dashed for word in sys.argv[1:]) else f"--{name}"
                if flag in names:
                    facts.found.arg_mappings.setdefault(key, flag)
        return original(parser, args, *more, **kwargs)

    replace(module.HfArgumentParser, "parse_args_into_dataclasses", parse)


def _are_of_the_command_line(args: Sequence[str] | None) -> bool:
    if args is None:
        return True
    ours, theirs = set(sys.argv[1:]), set(args)
    return bool(ours and theirs) and (theirs <= ours or ours <= theirs)


def _neither_save_nor_evaluate(module: ModuleType) -> None:
    # Whatever the Trainer's arguments or a callback say.
    never = property(lambda control: False, lambda control, value: None)
    put(module.TrainerControl, "should_save", never)
    put(module.TrainerControl, "should_evaluate", never)


def _train_only(module: ModuleType) -> None:
    def train(
        original: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # The arguments' own check is too early, because a script may make as many samples as its steps take.
        setattr(trainer, _LENGTH, trainer.args.max_steps)
        trainer.args.max_steps = max(trainer.args.max_steps, _STEPS)
        return original(trainer, None, *args, **kwargs)

    def set_initial_values(
        original: Callable[..., Any], trainer: Any, arguments: Any, *args: Any, **kwargs: Any
    ) -> Any:
        longer, arguments.max_steps = arguments.max_steps, getattr(trainer, _LENGTH)
        try:
            *_, length = original(trainer, arguments, *args, **kwargs)
            setattr(trainer, _LENGTH, length)
        finally:
            arguments.max_steps = longer
        return original(trainer, arguments, *args, **kwargs)

    def schedule(original: Callable[..., Any], trainer: Any, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        # The learning rate warms up and falls over the user's steps, however many a trial may take.
        length = getattr(trainer, _LENGTH, 0)
        return original(trainer, length if length > 0 else num_training_steps, *args, **kwargs)

    replace(module.Trainer, "train", train)
    if hasattr(module.Trainer, "set_initial_training_values"):
        replace(module.Trainer, "set_initial_training_values", set_initial_values)
    replace(module.Trainer, "create_scheduler", schedule)
    replace(module, "deepspeed_init", schedule)
    for name in ("save_model", "save_state", "save_metrics", "push_to_hub", "create_model_card"):
        if hasattr(module.Trainer, name):
            replace(module.Trainer, name, lambda original, *args, **kwargs: None)


def _save_where(to_save: _ToSave, owner: type) -> None:
    # Saves into the given folders alone. A program may read back what it saves before it trains.

    def save(original: Callable[..., Any], saved: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        where = to_save(save_directory)
        # A tokenizer returns the names of its files.
        return () if where is None else original(saved, where, *args, **kwargs)

    replace(owner, "save_pretrained", save)
