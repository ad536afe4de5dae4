"""The command that trains with a configuration, as a user types it."""

import contextlib
import json
import os
import pkgutil
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH, TRAINING_ARGUMENTS
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.inputs.accelerate import CONFIG_VARIABLE, accelerate_variables
from zerotune.trial_lib.inputs.entrypoint import split_flag
from zerotune.trial_lib.inputs.launchers import launcher_named, launcher_of
from zerotune.trial_lib.inputs.places import FileTarget, in_wrapper, trial_command, without_option
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.inputs.words import ASSIGNMENT, split_command
from zerotune.trial_lib.inputs.yaml_document import written_yaml
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_all, write_whole
from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.messages.secrets import redact
from zerotune.trial_lib.messages.turned import (
    ATTENTION,
    CHECKPOINTING,
    COMPILE,
    COMPILE_OPTION,
    FUSED,
    LOADER_OPTIONS,
    OPTIMIZER_OPTION,
    PERSISTENT,
    PREFETCH,
    WORKERS,
    turned_among,
)
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.switches import PROGRAM, SwitchValue
from zerotune.trial_lib.study.code_lines import arguments_to_set, to_set_in_code, unpartitioned
from zerotune.trial_lib.study.followed import rewrapped
from zerotune.trial_lib.study.program import KnownProgram, interpreter_of, variables_of
from zerotune.trial_lib.study.setup import StudySetup

# The experiment with the winner's switches in its command, for a training at full length.


def write_best_experiment(
    setup: StudySetup, arg_mappings: Mapping[str, str], config: Mapping[str, Any], switches: Mapping[str, SwitchValue]
) -> Path:
    """Writes an experiment whose command has the winner's switches. Everything else in it stays as submitted."""
    experiment, environment, paths = setup.experiment, setup.environment, setup.paths
    document = dict(experiment.document.data)
    # The training hands over configuration and batch itself. Only the copies of files have the batch too.
    entrypoint = experiment.entrypoint.model_copy(update={"config_positions": (), "config_variables": ()})
    of_wrapper = in_wrapper(arg_mappings, entrypoint.arguments, entrypoint.wrapper, experiment.model_dir)
    # The program's own words have what the wrapper makes of its files.
    entrypoint, mappings = rewrapped(entrypoint, paths.best_ds_config, arg_mappings, config, experiment.model_dir)
    in_files = {key: target for key, target in mappings.items() if FileTarget.read(target) is not None}
    command = trial_command(
        entrypoint, paths.best_ds_config, in_files, config, environment, experiment.model_dir, switches
    )
    write_all(command.files)
    variables = variables_of(switches, entrypoint.arguments, environment)
    typed = experiment.config.entrypoint
    words = split_command(typed, "entrypoint") if isinstance(typed, str) else list(typed)
    launcher = words[: len(words) - len(entrypoint.arguments)]
    document["entrypoint"] = [*_assigned(launcher, variables), *command.arguments]
    turned = {**experiment.config.turned, **turned_among(switches)}
    document |= {"turned": turned} if turned else {}
    if mapped := document.get("arg_mappings"):
        document["arg_mappings"] = {
            key: str(replace(file, path=command.copies.get(file.path, file.path))) if file else target
            for key, target, file in ((key, each, FileTarget.read(each)) for key, each in mapped.items())
            if key not in of_wrapper
        }
    space = {key: value for key, value in (document.pop("search_space", None) or {}).items() if key != PROGRAM}
    document |= {"search_space": space} if space else {}
    text = written_yaml(document, "Written by zerotune: your experiment, with the winner's switches of the program.")
    write_whole(paths.best_experiment, text, mode=0o600)
    return paths.best_experiment


def _assigned(launcher: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    # The words before a program's arguments with variables set, each in the place of a typed assignment.
    words, left = list(launcher), dict(variables)
    position = begin = 1 if words[:1] == ["env"] else 0
    while position < len(words) and ASSIGNMENT.match(words[position]):
        name = words[position].partition("=")[0]
        if name in left:
            words[position] = f"{name}={left.pop(name)}"
        position += 1
    return [*words[:begin], *(f"{name}={value}" for name, value in left.items()), *words[begin:]]


# How you apply the switches that ZeroTune has turned: by a Trainer's options, or a line in your code. Pure.

_AS_THEY_ARE = {ATTENTION: "--attn_implementation", COMPILE: COMPILE_OPTION, **LOADER_OPTIONS}  # options with values
_ADAM = {True: "adamw_torch_fused", False: "adamw_torch"}  # by whether it is fused
_OF_WORKERS = (PREFETCH, PERSISTENT)  # torch and the Trainer refuse these settings if there are no workers
_BY_CALL = "calls each such block by torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False)"


def _checkpointing(kind: Any) -> str:
    if kind == "none":
        return (
            "model.gradient_checkpointing_disable() before deepspeed.initialize, so that no activation is recomputed."
        )
    which = "the repeated blocks" if kind == "full" else "every second repeated block, from the first one on"
    return (
        f"activation checkpointing of {which} before deepspeed.initialize: a Hugging Face model has "
        f"gradient_checkpointing_enable with use_reentrant=False, and any other {_BY_CALL}."
    )


_SAID: dict[str, Callable[[Any], str]] = {
    CHECKPOINTING: _checkpointing,
    COMPILE: lambda is_on: "engine.compile() behind deepspeed.initialize." if is_on else "no engine.compile().",
    ATTENTION: 'attn_implementation="{0}" where the model is loaded, or model.set_attn_implementation("{0}").'.format,
}


def _loader(place: str, value: Any, found: ProgramProfile) -> str:
    by_trainer = found.loading is not None and found.loading.by_trainer
    refused = [f"{'dataloader_' if by_trainer else ''}{each.partition(':')[2]}" for each in _OF_WORKERS]
    without = f", without {' and '.join(refused)}" if (place, value) == (WORKERS, 0) else ""
    if by_trainer:
        return f"{_typed(LOADER_OPTIONS[place].lstrip('-'), value)} of the training arguments{without}."
    line = found.loading.made_at if found.loading is not None else ""
    return f"{place.partition(':')[2]}={value} in the DataLoader{f' at {line}' if line else ''}{without}."


def _fused(value: Any, found: ProgramProfile) -> str:
    if MICRO_BATCH in found.batch:
        # Hugging Face's training arguments have the batch, so the Trainer makes the optimizer.
        return f"{_typed(OPTIMIZER_OPTION.lstrip('-'), _ADAM[bool(value)])} of the training arguments."
    # An explicit False would keep torch from its own choice of a form.
    if not found.optimizer:
        # DeepSpeed makes it, and hands on what `params` has beside `torch_adam` (deepspeed/runtime/engine.py).
        word = '"fused": true' if value else 'no "fused"'
        return f"{word} in optimizer.params of the DeepSpeed configuration."
    optimizer = found.optimizer.rpartition(".")[2]
    return f"fused=True in {optimizer}(...)." if value else f"{optimizer}(...) without fused=True."


def _typed(name: str, value: Any) -> str:
    return f"--{name} {value}, or {name}={value!r},"


def lines_to_write(turned: Mapping[str, Any], own: Mapping[str, Any], found: ProgramProfile | None = None) -> list[str]:
    """A sentence for each switch that the winner turned to another value than the program's own."""

    def said(place: str, value: Any) -> str:
        if place in LOADER_OPTIONS:
            return _loader(place, value, found or ProgramProfile())
        return _fused(value, found or ProgramProfile()) if place == FUSED else _SAID[place](value)

    return [
        f"ZeroTune turned {place} in the trials. In the code that is {said(place, turned[place])}"
        for place in differing(turned, own)
    ]


def trainer_options(turned: Mapping[str, Any], own: Mapping[str, Any], offered: Collection[str]) -> dict[str, str]:
    """The options of a Trainer's command line that set switches, of those `offered` that have an effect there."""
    each = (_options_of(place, turned[place], offered) for place in differing(turned, own))
    return {name: value for options in each for name, value in options.items()}


def options_to_remove(turned: Mapping[str, Any], own: Mapping[str, Any], offered: Collection[str]) -> list[str]:
    """The options of a Trainer's command line that it refuses with those of `trainer_options`."""
    # Without workers the Trainer refuses the user's own settings of workers too.
    has_none = trainer_options(turned, own, offered).get(LOADER_OPTIONS[WORKERS]) == "0"
    return [LOADER_OPTIONS[place] for place in _OF_WORKERS] if has_none else []


def left_to_write(turned: Mapping[str, Any], own: Mapping[str, Any], offered: Collection[str]) -> dict[str, Any]:
    """The switches that no option of the Trainer's sets."""
    return {place: turned[place] for place in differing(turned, own) if not _options_of(place, turned[place], offered)}


def differing(turned: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """The switches with another value than the program's own, as far as they have an effect."""
    others = [place for place, value in turned.items() if value != own.get(place)]
    # Without workers ranks leave these out, because torch and the Trainer refuse them.
    without = () if turned.get(WORKERS, own.get(WORKERS)) != 0 else _OF_WORKERS
    return [place for place in others if place not in without]


def _options_of(place: str, value: Any, offered: Collection[str]) -> dict[str, str]:
    if place in _AS_THEY_ARE:
        options = {_AS_THEY_ARE[place]: str(value)}
    elif place == FUSED:
        options = {OPTIMIZER_OPTION: _ADAM[bool(value)]}
    elif place != CHECKPOINTING or (value == "every_second" and "--activation_checkpointing" not in offered):
        # Before transformers 5 a Trainer has all layers or none.
        return {}
    elif value == "none":
        options = {"--gradient_checkpointing": "False"}
    else:
        more = {"every_n_layers": 2} if value == "every_second" else {}
        how = json.dumps({**more, "use_reentrant": False})
        options = {"--gradient_checkpointing": "True", "--gradient_checkpointing_kwargs": how}
    return options if options.keys() <= set(offered) else {}


_DEEPSPEED = "deepspeed"
_NOTHING = ("", "~", "null")


def training_command(
    setup: StudySetup, known: KnownProgram, config: dict[str, Any], switches: Mapping[str, SwitchValue] | None = None
) -> str:
    """The command that trains with the winning configuration, under the conditions of the trials.

    It is the one that was tuned, which a wrapper may have started. Files that it names beside that configuration are
    written.
    """
    experiment, paths, config = setup.experiment, setup.paths, known.in_words(config)
    entrypoint = experiment.entrypoint
    variables, secrets = typed_environment(setup)
    trained = paths.experiment
    if switches:
        trained = write_best_experiment(setup, known.arg_mappings, config, switches)
    words = [beside(sys.executable, "zerotune"), "train", str(trained), str(experiment.model_dir)]
    by_zerotune = assignments(variables) + shlex.join([*words, "--ds-config", str(paths.best_ds_config)])
    if entrypoint.trial_class is not None:
        return f"{by_zerotune}\n"
    # The program's words with the winner's values.
    in_files = _training_arguments_in_files(experiment, known, config, paths)
    by_accelerate = accelerate_variables(variables, config, paths.best_ds_config)
    entrypoint, mappings = rewrapped(entrypoint, paths.best_ds_config, known.arg_mappings, config, experiment.model_dir)
    turned, own = turned_among(switches or {}), known.switches
    offered = () if known.found is None else known.found.trainer_options
    command = trial_command(
        entrypoint,
        paths.best_ds_config,
        mappings,
        config,
        setup.environment,
        folder=experiment.model_dir,
        switches={**(switches or {}), **trainer_options(turned, own, offered), **in_files},
    )
    write_all(command.files)
    # The launcher sets these from its options.
    variables = by_accelerate | {
        name: value for name, value in command.variables.items() if name not in entrypoint.config_variables
    }
    words = _typed_launcher(setup, config) if entrypoint.launcher else _own_launcher(setup)
    arguments = command.arguments
    for option in options_to_remove(turned, own, offered):
        arguments = without_option(option, arguments)
    typed = assignments(variables) + shlex.join([*words, *arguments])
    # What no word of the command sets.
    lines = [f"cd {shlex.quote(str(experiment.model_dir))}", typed]
    named = {place.rpartition(":")[2] for place in in_files}
    by_command = bool(entrypoint.config_positions) or launcher_named(entrypoint.launched_by).hands_over_config
    is_told = by_command or _DEEPSPEED in named or CONFIG_VARIABLE in by_accelerate
    to_write = [] if is_told else to_set_in_code(experiment, known, config, paths)
    if known.is_batch_in_code:
        left = [key for key, name in TRAINING_ARGUMENTS.items() if name not in named]
        to_write += arguments_to_set(experiment, {key: config[key] for key in left})
    to_write += unpartitioned(known, config)
    to_write += lines_to_write(left_to_write(turned, own, offered), own, known.found)
    if to_write:
        # As typed, the program would train with the values in its code.
        by_hand = [*to_write, "Then, without ZeroTune:", *lines, "With ZeroTune the code stays as it is:"]
        lines = [*(f"# {line}" for line in by_hand), by_zerotune]
    return "\n".join([*secrets_first(secrets), *lines]) + "\n"


def _training_arguments_in_files(
    experiment: Experiment, known: KnownProgram, config: Mapping[str, Any], paths: StudyPaths
) -> dict[str, SwitchValue]:
    values = {name: config[key] for key, name in TRAINING_ARGUMENTS.items() if known.is_batch_in_code}
    values |= {} if known.found is None else {_DEEPSPEED: str(paths.best_ds_config)}
    found: dict[str, SwitchValue] = {}
    for argument in experiment.entrypoint.arguments:
        _, path = split_flag(argument)
        for name, value in values.items():
            with contextlib.suppress(InputError):
                place = FileTarget.read(f"{path}:{name}")
                if (
                    place is not None
                    and place.find(experiment.entrypoint.arguments, experiment.model_dir)[1] not in _NOTHING
                ):
                    found[f"{path}:{name}"] = value
    return found


def secrets_first(secrets: Sequence[str]) -> list[str]:
    first = "# Set these variables first. Their values are secret, so this file leaves them out:"
    return [f"{first} {' '.join(secrets)}"] if secrets else []


def program_as_typed(experiment: Experiment) -> list[str]:
    # The user's own words up to the script. They start as many ranks as the trials had.
    entrypoint = experiment.entrypoint
    program, *rest = entrypoint.launcher
    first = launcher_of(entrypoint.launcher)
    if first is None or first.comes_with_python:
        if os.sep not in program:
            program = beside(interpreter_of(experiment), program)
        elif shutil.which(Path(program).name) == program:
            program = Path(program).name
    return [program, *rest]


def _typed_launcher(setup: StudySetup, config: Mapping[str, Any]) -> list[str]:
    experiment, paths, entrypoint = setup.experiment, setup.paths, setup.experiment.entrypoint
    program, *rest = program_as_typed(experiment)
    retype = launcher_named(entrypoint.launched_by).retype
    if not retype:
        return [program, *rest]
    shown = entrypoint.model_copy(update={"launcher": (program, *rest)})
    words: list[str] = pkgutil.resolve_name(retype)(
        shown, config, paths.best_ds_config, paths.best_accelerate_config, folder=experiment.model_dir
    )
    return words


def _own_launcher(setup: StudySetup) -> list[str]:
    entrypoint = setup.experiment.entrypoint
    target = ["--module", entrypoint.module] if entrypoint.module else [entrypoint.script or ""]
    started = [kind_of(setup.device).ranks_option, str(setup.slots)]
    if setup.experiment.config.resources.hosts:
        started = ["--hostfile", str(setup.paths.trial(0).hostfile)]
    local_rank = [] if entrypoint.local_rank_option else ["--no_local_rank"]
    return [beside(interpreter_of(setup.experiment), "deepspeed"), *started, *local_rank, *target]


def assignments(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())


def typed_environment(setup: StudySetup) -> tuple[dict[str, str], list[str]]:
    # The variables that the shell does not have, and the names of the secret ones, which no file may contain.
    own, variables = setup.experiment.environment_variables, setup.environment
    secrets = [name for name, value in redact(own).items() if value != own[name]]
    # The launcher sets its own again.
    by_launcher = setup.experiment.entrypoint.launcher_environment
    wanted = {"OMP_NUM_THREADS", "PYTHONPATH", *own} - {*secrets, *by_launcher}
    return {
        name: variables[name]
        for name in sorted(wanted)
        if name in variables and os.environ.get(name) != variables[name]
    }, secrets


def beside(interpreter: str, name: str) -> str:
    # How to call a program of an environment: by its name, or by its path if a shell would find another.
    program = Path(interpreter).with_name(name)
    return name if shutil.which(name) == str(program) else str(program)
