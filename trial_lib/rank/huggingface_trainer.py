"""The Hugging Face Trainer in a trial: its arguments follow the candidate, and it only trains.

An unmodified Trainer script passes DeepSpeed's configuration to `TrainingArguments`, or lets `accelerate launch` do so.
`TrainingArguments` fills in "auto" values, and refuses a configuration that contradicts its own arguments. In a trial

* The batch arguments are the candidate's, and so is every configuration that transformers or accelerate reads. With
  `split_batches` all ranks divide a batch of the argument's size. The engine gets the size of each rank then, and
  not the argument, as in a plain run.
* `output_dir` is a folder of the trial's own. The Trainer finds no last checkpoint of the user's in it, and overwrites
  none.
* Nothing is evaluated, pushed to a hub, reported to a tracker or resumed.
* A model or a tokenizer that the program saves before its first step is saved, because the program may read it back.
  `UserFiles` gives the folder, so that nothing of the user's changes. Later the program saves nothing.
* Training goes on until the trial has measured enough.

Each replacement is made when the program imports its module. A program without transformers pays nothing.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import (
    MICRO_BATCH,
    TRAIN_BATCH,
    TRAINING_ARGUMENTS,
    difference,
    with_typed_sizes,
)
from zerotune.trial_lib.messages.turned import TRAINER_OPTIONS
from zerotune.trial_lib.rank.accelerate import merge_into
from zerotune.trial_lib.rank.patching import replace, when_imported
from zerotune.trial_lib.rank.program_facts import ProgramFacts

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

    setattr(owner, "__init_subclass__", classmethod(init_subclass))  # noqa: B010 - mypy refuses an assignment
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
        setattr(owner, name, functools.wraps(original)(wrap(original)))


# Training ends with the trial, long before this many optimizer steps.
_STEPS = 1_000_000
# The attribute of a Trainer with its own number of optimizer steps, or with `max_steps` before that number is known.
_LENGTH = "zerotune_length"

# Takes a folder that the program names, and returns the one to save into.
_ToSave = Callable[[str | os.PathLike[str]], str | os.PathLike[str] | None]

# They follow from the number of steps, which is not the user's in a trial.
_OF_THE_LENGTH = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")


def install(
    facts: ProgramFacts, overrides: Mapping[str, Any], scratch: Path, to_save: _ToSave, to_save_model: _ToSave
) -> None:
    """Makes transformers, accelerate's configuration and PEFT follow the trial, before the program runs.

    `to_save` returns the folder that takes a tokenizer now, in place of the program's, or None if the program may not
    save it. `to_save_model` does the same for a model.
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


def adopt(ds_config: Mapping[str, Any], is_in_code: bool) -> None:
    """Makes the Trainer train at full length with a complete configuration, and with arguments that agree with it.

    If the program's own configuration is in its code, the differences are merged into that.
    """
    when_imported("transformers.training_args", functools.partial(_take_batch, ds_config))
    if is_in_code:
        when_imported("accelerate.utils.deepspeed", functools.partial(_merge_difference, ds_config))


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
        if facts.divided_among == 1:
            facts.divided_among = ranks
            facts.batch[MICRO_BATCH] //= ranks
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
            facts.batch.setdefault(key, int(getattr(arguments, name)))
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
            facts.trainer_options = sorted(names & set(TRAINER_OPTIONS))
            for key, name in TRAINING_ARGUMENTS.items():
                # The flag as the user has typed it: transformers accepts dashes for underscores.
                dashed = f"--{name.replace('_', '-')}"
                flag = dashed if any(word.split("=")[0] == dashed for word in sys.argv[1:]) else f"--{name}"
                if flag in names:
                    facts.arg_mappings.setdefault(key, flag)
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
    module.TrainerControl.should_save = module.TrainerControl.should_evaluate = never


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
