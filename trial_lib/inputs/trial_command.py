"""The command of one trial: the user's, with the trial's DeepSpeed configuration, batch and switches in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trial_lib.deepspeed_config.overrides import named_alike, setting_at
from trial_lib.inputs.entrypoint import Entrypoint, split_flag
from trial_lib.inputs.places import FileTarget, is_variable, text_in_file, with_switch
from trial_lib.messages.turned import in_command
from trial_lib.records.switches import SwitchValue, text_of

# The folder with a trial's copies of files that its command names. It is beside the trial's configuration.
COMMAND_FILES = "command_files"

_SHOWN = 20

# A change in a command: the old text, which is empty if something was added, and the new text.
WordChange = tuple[str, str]


@dataclass(frozen=True)
class TrialCommand:
    arguments: list[str]  # the program's arguments
    variables: dict[str, str]  # the environment variables that the trial sets
    files: dict[str, str]  # the texts of the trial's copies of files, by their paths
    changes: list[WordChange]  # the differences from the user's command
    # The path of each of these files, by the path of the user's file as the place names it
    copies: dict[str, str] = field(default_factory=dict)


def trial_command(
    entrypoint: Entrypoint,
    config_path: Path,
    arg_mappings: Mapping[Any, str],
    config_values: Mapping[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    switches: Mapping[str, SwitchValue] | None = None,
) -> TrialCommand:
    """`config_path` is the trial's DeepSpeed configuration, and replaces the user's. If `config_values` has no value
    for a mapped key, or "auto", the place stays as the user wrote it. `environment` is the ranks' without the
    trial's variables. Switches that ZeroTune turns stay out.
    Raises InputError: a file that a mapping or a switch names has changed, and the value is not found in it any
    more.
    """
    placed = in_command(switches or {})
    mapped: dict[str, SwitchValue] = {place: value for place, value in placed.items() if value is not None}
    decided = {target: setting_at(config_values, key) for key, target in arg_mappings.items()}
    mapped |= {target: value for target, value in decided.items() if value not in (None, "auto")}
    own_files = _own_files(mapped, entrypoint.arguments, folder)
    arguments, changes = list(entrypoint.arguments), []
    files: dict[str, str] = {}
    copies: dict[str, str] = {}
    for number, (file, text) in enumerate(own_files.items()):
        copy = config_path.parent / COMMAND_FILES / str(number) / Path(file.path).name
        files[str(copy)] = text
        copies[file.path] = str(copy)
        changes += _with_path(arguments, file.positions(entrypoint.arguments, folder), copy)
    named = [(position, split_flag(arguments[position])[0]) for position in entrypoint.config_positions]
    for position, before in named:
        typed = arguments[position].removeprefix(before)
        word = named_alike(typed, config_values, config_path)
        arguments[position] = f"{before}{word}"
        # The configuration itself is too long to be shown.
        changes.append((typed if word == str(config_path) else f"{typed[:_SHOWN]}...", str(config_path)))
    variables = {name: str(config_path) for name in entrypoint.config_variables}
    # Words by their numbers come first, because other targets may add words.
    for target, value in sorted(mapped.items(), key=lambda item: not item[0].startswith("argv:")):
        if is_variable(target, entrypoint.arguments):
            variables[target] = text_of(value, environment.get(target, ""))
            continue
        arguments, changed = with_switch(target, arguments, value)
        changes += changed
    changes += [
        (f"{name}={environment[name]}" if name in environment else "", f"{name}={value}")
        for name, value in variables.items()
    ]
    changed_words = [(old, new) for old, new in changes if old != new]
    return TrialCommand(arguments, variables, files, changed_words, copies)


def _own_files(mapped: Mapping[str, SwitchValue], arguments: Sequence[str], folder: Path) -> dict[FileTarget, str]:
    texts: dict[str, tuple[FileTarget, str]] = {}
    for name, value in mapped.items():
        target = FileTarget.read(name)
        if target is not None:
            first, text = texts.get(target.path, (target, None))
            found = target.find(arguments, folder, text)
            texts[target.path] = first, found.replaced(text_in_file(name, value, found.text))
    return dict(texts.values())


def _with_path(arguments: list[str], positions: Sequence[tuple[int, str]], path: Path) -> list[WordChange]:
    # Replaces the user's path in arguments, and keeps the text before it in each.
    changes = []
    for position, before in positions:
        changes.append((arguments[position].removeprefix(before), str(path)))
        arguments[position] = f"{before}{path}"
    return changes
