"""The command that trains with a configuration, as a user types it."""

import contextlib
import json
import os
import pkgutil
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trial_lib.command.accelerate_launch import CONFIG_VARIABLE
from trial_lib.command.accelerate_rewrite import accelerate_variables
from trial_lib.command.entrypoint import Entrypoint, split_flag
from trial_lib.command.file_targets import FileTarget
from trial_lib.command.launchers import launcher_named, launcher_of
from trial_lib.command.mapping_targets import without_option
from trial_lib.command.switches import SwitchValue, deepspeed_part
from trial_lib.command.trial_command import trial_command
from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, TRAINING_ARGUMENTS, difference
from trial_lib.device.host.this_host import kind_of
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.records.study_folder import StudyPaths
from trial_lib.secrets.by_name import redact
from trial_lib.space.knobs import STAGE, get_knob
from trial_lib.space.turned_in_code import left_to_write, lines_to_write, options_to_remove, trainer_options
from trial_lib.study.best_experiment import write_best_experiment
from trial_lib.study.build_program import interpreter_of
from trial_lib.study.known_program import KnownProgram
from trial_lib.study.setup import StudySetup
from trial_lib.study.wrapped_command import rewrapped, wrapped_command
from trial_lib.wire.errors import InputError
from trial_lib.wire.turned import turned_among
from trial_lib.wire.whole_files import write_all

_DEEPSPEED = "deepspeed"
_NOTHING = ("", "~", "null")
# The places of the batch in a program of Lightning's. The product follows.
_BY_LIGHTNING = {
    MICRO_BATCH: "batch_size={} of your DataLoader",
    ACCUMULATION: "accumulate_grad_batches={} of Lightning's Trainer",
    TRAIN_BATCH: "",
}


def training_command(
    setup: StudySetup,
    known: KnownProgram,
    config: dict[str, Any],
    switches: Mapping[str, SwitchValue] | None = None,
    by_wrapper: bool = False,
) -> str:
    """Returns the command that trains with the winning configuration, under the conditions of the trials.

    Files that the command names beside that configuration are written.

    Args:
        setup: the study's.
        known: the user's program.
        config: the winning configuration.
        switches: the winner's values of the program's switches, by their places.
        by_wrapper: whether the command is to be what the user typed, if that starts the study's command.
    """
    experiment, paths, config = setup.experiment, setup.paths, known.in_words(config)
    entrypoint = experiment.entrypoint
    variables, secrets = _environment(experiment, setup.environment)
    trained = paths.experiment
    if switches:
        trained = write_best_experiment(experiment, paths, known.arg_mappings, config, setup.environment, switches)
    words = [_beside(sys.executable, "zerotune"), "train", str(trained), str(experiment.model_dir)]
    by_zerotune = _assignments(variables) + shlex.join([*words, "--ds-config", str(paths.best_ds_config)])
    if entrypoint.trial_class is not None:
        return f"{by_zerotune}\n"
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
    words = (
        _typed_launcher(experiment, config, paths)
        if entrypoint.launcher
        else _own_launcher(experiment, setup.device, paths)
    )
    arguments = command.arguments
    for option in options_to_remove(turned, own, offered):
        arguments = without_option(option, arguments)
    typed = _assignments(variables) + shlex.join([*words, *arguments])
    if by_wrapper and words[1:] == list(entrypoint.launcher[1:]):
        # A launcher with another configuration among its own words is not what the wrapper starts.
        typed = wrapped_command(entrypoint, arguments, variables, experiment.model_dir) or typed
    lines = [f"cd {shlex.quote(str(experiment.model_dir))}", typed]
    named = {place.rpartition(":")[2] for place in in_files}
    is_told = _is_told(entrypoint) or _DEEPSPEED in named or CONFIG_VARIABLE in by_accelerate
    to_write = [] if is_told else _to_set_in_code(known, config, paths)
    if known.is_batch_in_code and not named.issuperset(TRAINING_ARGUMENTS.values()):
        left = [f"{name}={config[key]}" for key, name in TRAINING_ARGUMENTS.items() if name not in named]
        to_write.append(f"The training arguments are in the code. Set {', '.join(left)}.")
    stage = get_knob(config, STAGE, 0)
    if stage != 3 and known.found is not None and known.found.partitions_its_model:
        # DeepSpeed's engine takes no partitioned parameters at these stages: a plain run would crash.
        to_write.append(f"The code makes its model within deepspeed.zero.Init: give it enabled=False at stage {stage}.")
    to_write += lines_to_write(left_to_write(turned, own, offered), own, known.found)
    if to_write:
        # As typed, the program would train with the values in its code.
        by_hand = [*to_write, "Then, without ZeroTune:", *lines, "With ZeroTune the code stays as it is:"]
        lines = [*(f"# {line}" for line in by_hand), by_zerotune]
    if secrets:
        lines.insert(
            0,
            f"# Set these variables first. Their values are secret, so this file leaves them out: {' '.join(secrets)}",
        )
    return "\n".join(lines) + "\n"


def _is_told(entrypoint: Entrypoint) -> bool:
    """Returns whether the command itself hands the program a DeepSpeed configuration."""
    return bool(entrypoint.config_positions) or launcher_named(entrypoint.launched_by).hands_over_config


def _training_arguments_in_files(
    experiment: Experiment, known: KnownProgram, config: Mapping[str, Any], paths: StudyPaths
) -> dict[str, SwitchValue]:
    """Returns the winner's values of the Trainer's arguments in files that the command names, by their places.

    TRL, LLaMA-Factory and other programs read them from a YAML file.
    """
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
                    and place.find(experiment.entrypoint.arguments, experiment.model_dir).text not in _NOTHING
                ):
                    found[f"{path}:{name}"] = value
    return found


def _to_set_in_code(known: KnownProgram, config: Mapping[str, Any], paths: StudyPaths) -> list[str]:
    """Returns what you have to change in the configuration in the code; nothing if the command sets it all."""
    base, by_command = deepspeed_part(known.base_config), set(known.arg_mappings)
    if TRAIN_BATCH not in base or {MICRO_BATCH, ACCUMULATION} <= by_command:
        # It follows from the two others, in DeepSpeed or in code that takes both from its command.
        by_command.add(TRAIN_BATCH)
    changes = [(path, value) for path, value in _dotted(difference(base, config)) if path not in by_command]
    if not changes:
        return []
    if known.found is not None and known.found.by_lightning:
        return _for_lightning(dict(changes))
    where = f"The DeepSpeed configuration is in the code. Set these values there, from {paths.best_ds_config}:"
    return [where, *(f"  {key}: {json.dumps(value)}" for key, value in changes)]


def _for_lightning(changes: Mapping[str, Any]) -> list[str]:
    """Returns where Lightning takes values of DeepSpeed's configuration. It refuses the accumulation there."""
    lines = [f"  {key}: {json.dumps(value)}" for key, value in changes.items() if key not in _BY_LIGHTNING]
    head = ["Pass DeepSpeedStrategy these values, as its own arguments or in its `config`:"] if lines else []
    set_ = [text.format(changes[key]) for key, text in _BY_LIGHTNING.items() if text and key in changes]
    return [*head, *lines, *([f"Set {' and '.join(set_)}."] if set_ else [])]


def _dotted(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _typed_launcher(experiment: Experiment, config: Mapping[str, Any], paths: StudyPaths) -> list[str]:
    """Returns the user's own words up to the script. They start as many ranks as the trials had."""
    entrypoint = experiment.entrypoint
    program, *rest = entrypoint.launcher
    first = launcher_of(entrypoint.launcher)
    if first is None or first.comes_with_python:
        if os.sep not in program:
            program = _beside(interpreter_of(experiment), program)
        elif shutil.which(Path(program).name) == program:
            program = Path(program).name
    retype = launcher_named(entrypoint.launched_by).retype
    if not retype:
        return [program, *rest]
    shown = entrypoint.model_copy(update={"launcher": (program, *rest)})
    words: list[str] = pkgutil.resolve_name(retype)(
        shown, config, paths.best_ds_config, paths.best_accelerate_config, folder=experiment.model_dir
    )
    return words


def _own_launcher(experiment: Experiment, device: str, paths: StudyPaths) -> list[str]:
    """Returns words that start the script of an entrypoint on the number of ranks in its YAML."""
    entrypoint = experiment.entrypoint
    ranks = kind_of(device).ranks_option
    target = ["--module", entrypoint.module] if entrypoint.module else [entrypoint.script or ""]
    resources = experiment.config.resources
    started = [ranks, str(resources.slots_per_trial)]
    if resources.hosts:
        started = ["--hostfile", str(paths.trial(0).hostfile)]
    local_rank = [] if entrypoint.local_rank_option else ["--no_local_rank"]
    return [_beside(interpreter_of(experiment), "deepspeed"), *started, *local_rank, *target]


def _assignments(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())


def _environment(experiment: Experiment, variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that the trials had and a shell may not have, and the names of the secret ones."""
    own = experiment.environment_variables
    secrets = [name for name, value in redact(own).items() if value != own[name]]
    wanted = {"OMP_NUM_THREADS", "PYTHONPATH", *own} - set(secrets)
    return {
        name: variables[name]
        for name in sorted(wanted)
        if name in variables and os.environ.get(name) != variables[name]
    }, secrets


def _beside(interpreter: str, name: str) -> str:
    """Returns how to call a program of an environment: by its name, or by its path if a shell would find another."""
    program = Path(interpreter).with_name(name)
    return name if shutil.which(name) == str(program) else str(program)
