"""The experiment with the winner's switches in its command, for a training at full length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trial_lib.command.file_targets import FileTarget, in_wrapper
from trial_lib.command.mapping_targets import is_variable
from trial_lib.command.switches import PROGRAM, SwitchValue, text_of
from trial_lib.command.trial_command import trial_command
from trial_lib.command.words import ASSIGNMENT, split_command
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.experiment.yaml_document import parse_yaml
from trial_lib.records.study_folder import StudyPaths
from trial_lib.study.wrapped_command import rewrapped
from trial_lib.wire.turned import turned_among
from trial_lib.wire.whole_files import write_all, write_whole

_NEVER_FOLDED = 1_000_000_000  # columns, because a folded word would have a line break


def write_best_experiment(
    experiment: Experiment,
    paths: StudyPaths,
    arg_mappings: Mapping[str, str],
    config: Mapping[str, Any],
    environment: Mapping[str, str],
    switches: Mapping[str, SwitchValue],
) -> Path:
    """Writes an experiment whose command has the winner's switches. Everything else in it stays as submitted.

    Args:
        experiment: what the user submitted.
        paths: the study's files.
        arg_mappings: the place in the command that sets each DeepSpeed key.
        config: the winning DeepSpeed configuration.
        environment: the environment of the ranks.
        switches: the winner's, by their places.

    Returns:
        The file.
    """
    document = parse_yaml(experiment.text, experiment.source).data
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
    variables = {
        place: text_of(value, environment.get(place, ""))
        for place, value in switches.items()
        if value is not None and is_variable(place, entrypoint.arguments)
    }
    typed = experiment.config.entrypoint
    words = split_command(typed, "entrypoint") if isinstance(typed, str) else list(typed)
    launcher = words[: len(words) - len(entrypoint.arguments)]
    document["entrypoint"] = [*_assigned(launcher, variables), *command.arguments]
    turned = {**experiment.config.turned, **turned_among(switches)}
    document |= {"turned": turned} if turned else {}
    if "arg_mappings" in document:
        document["arg_mappings"] = {
            key: _in_copy(target, command.copies)
            for key, target in document["arg_mappings"].items()
            if key not in of_wrapper
        }
    space = {key: value for key, value in document.pop("search_space", {}).items() if key != PROGRAM}
    document |= {"search_space": space} if space else {}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=_NEVER_FOLDED)
    head = "# Written by zerotune: your experiment, with the winner's switches of the program.\n"
    write_whole(paths.best_experiment, head + text, mode=0o600)
    return paths.best_experiment


def _assigned(launcher: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Returns the words before a program's arguments with variables set, each in the place of a typed assignment."""
    words, left = list(launcher), dict(variables)
    begin = 1 if words[:1] == ["env"] else 0
    position = begin
    while position < len(words) and ASSIGNMENT.match(words[position]):
        name = words[position].partition("=")[0]
        if name in left:
            words[position] = f"{name}={left.pop(name)}"
        position += 1
    return [*words[:begin], *(f"{name}={value}" for name, value in left.items()), *words[begin:]]


def _in_copy(target: str, copies: Mapping[str, str]) -> str:
    """Returns the target of a mapping, in the copy of its file if there is one."""
    file = FileTarget.read(target)
    return target if file is None or file.path not in copies else f"{copies[file.path]}:{file.key}"
