"""Places in the user's command that hold a value, and the command of a trial, which sets them."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zerotune.trial_lib.deepspeed_config.overrides import named_alike
from zerotune.trial_lib.inputs.documents import Key, edited, text_at, with_whole_paths
from zerotune.trial_lib.inputs.entrypoint import Entrypoint, split_flag
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import read_bounded
from zerotune.trial_lib.messages.turned import TURNED_PLACE, in_command
from zerotune.trial_lib.records.switches import SwitchValue, boolean_of, is_option, text_of
from zerotune.trial_lib.search.knobs import get_knob

# A value in a file that the user's command names. A trial gets its own copy of the file.

# How such a target is written: `conf/train.yaml:trainer.batch`.
FILE_TARGET = r"[^\s=:]+\.(yaml|yml|json|toml):[^\s=:]+"


@dataclass(frozen=True)
class FileTarget:
    path: str  # the path of the file, as the user wrote it
    # The path to the value, with dots. A number counts from 0 in a list. A + before it adds what a base file has.
    key: str

    @classmethod
    def read(cls, target: str) -> "FileTarget | None":
        """None for any target but a value in a file."""
        if target.startswith("-") or not re.fullmatch(FILE_TARGET, target):
            return None
        path, _, key = target.partition(":")
        return cls(path, key)

    def __str__(self) -> str:
        return f"{self.path}:{self.key}"

    @property
    def keys(self) -> Key:
        return tuple(self.key.removeprefix("+").split("."))

    def positions(self, arguments: Sequence[str], folder: Path) -> list[tuple[int, str]]:
        """Returns each position of the file's path in the arguments, and the text before it, such as `--config=`.

        A path may be relative to a folder that another argument names, as in `-d configs small.yml`.
        """
        own = (folder / self.path).resolve()
        found = []
        for position, word in enumerate(arguments):
            name, equals, value = word.partition("=")
            for before, path in (("", word), (name + equals, value)):
                if path and (folder / path).resolve() == own:
                    found.append((position, before))
                    break
        if not found:
            # A word may be too long for a path.
            folders = [folder / word for word in arguments if word and os.path.isdir(folder / word)]  # noqa: PTH112
            found = [
                (position, "")
                for position, word in enumerate(arguments)
                if word and any((each / word).resolve() == own for each in folders)
            ]
        return found

    def find(self, arguments: Sequence[str], folder: Path, document: str | None = None) -> tuple[str, str]:
        """Returns the text of the file, which may be given as `document`, and of the value in it.
        Raises InputError: no argument is the file's path, the file cannot be read, or it has no such value.
        """
        if not self.positions(arguments, folder):
            remedy = "Name a file that is: a trial is given its own copy in the place of that argument."
            raise self._error(f"no argument of the program is {self.path}", remedy)
        try:
            text = read_bounded(folder / self.path) if document is None else document
            value = text_at(text, self.path, self.keys)
        except (OSError, ValueError) as error:
            problem = " ".join(str(error).split())
            raise self._error(f"{self.path} cannot be read ({problem})", "Mend it, or name another place.") from None
        if value is None and self.key.startswith("+"):
            return text, ""
        if value is None:
            remedy = "Write its keys from the top, with dots between them."
            raise self._error(f"{self.path} has no value {self.key}", remedy)
        return text, value

    def _error(self, what: str, remedy: str) -> InputError:
        return InputError(f"{what}.", where=str(self), remedy=remedy)


def in_wrapper(
    arg_mappings: Mapping[Any, str], arguments: Sequence[str], wrapper: Sequence[str], folder: Path
) -> dict[str, str]:
    """Returns the mappings to files that a wrapper reads, and does not hand over to the program."""
    files = ((str(key), target, FileTarget.read(target)) for key, target in arg_mappings.items() if wrapper)
    return {key: target for key, target, file in files if file is not None and not file.positions(arguments, folder)}


def unquoted(text: str) -> str:
    try:
        loaded = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return text
    return loaded if isinstance(loaded, str) else text


# Places in the user's command that hold a value: the targets of `arg_mappings`, and the switches of a program.

_KEY = r"[A-Za-z_][\w-]*(\.[\w-]+)*"
_OPTION, _VARIABLE, _WORD = r"--?[A-Za-z][^\s=]*", r"[A-Za-z_]\w*", r"argv:[1-9]\d*"
_OVERRIDE = rf"\+{{1,2}}{_KEY}|[A-Za-z_][\w-]*(\.[\w-]+)+"
# An option, an environment variable, an override `key=value`, a value in a file, or a word by its number.
MAPPING_TARGET = rf"^({_OPTION}|{_VARIABLE}|{_OVERRIDE}|{FILE_TARGET}|{_WORD})$"
# The places, as a message names them.
PLACES = (
    "an option (--batch-size), an environment variable (BATCH), an override (trainer.batch), a value in a file of the "
    "command (conf.yaml:trainer.batch), or a word by its number (argv:2)"
)
# A place of a switch: a target, or the name of a switch that ZeroTune turns.
SWITCH_PLACE = rf"{MAPPING_TARGET}|^{TURNED_PLACE}$"

_AN_OVERRIDE = re.compile(rf"[+~]{{0,2}}{_KEY}=")
_NEGATIVE = re.compile(r"-\.?\d")


@dataclass(frozen=True)
class Typed:
    begin: int  # the position of its first word among the program's arguments
    end: int  # the position behind its last word
    name: tuple[str, ...]  # the words before the word with the value
    before: str  # the text before the value in that word
    value: str  # the value as the user typed it. Empty if there is none.

    def words(self, value: str) -> list[str]:
        return [*self.name, f"{self.before}{value}"]


def is_plain_name(place: str) -> bool:
    """Whether it has no dots: an environment variable, unless an argument has that name."""
    return re.fullmatch(_VARIABLE, place) is not None


def is_variable(target: str, arguments: Sequence[str]) -> bool:
    """Whether it is an environment variable: a plain name without an argument `name=value`."""
    return is_plain_name(target) and not typed_as(target, arguments)


def typed_as(target: str, arguments: Sequence[str]) -> list[Typed]:
    """Returns the places of a target among the arguments, in order. Most parsers use the last one.
    Raises InputError: the target is a word by its number, and there are fewer words.
    """
    if target.startswith("-"):
        return _options(target, arguments)
    if target.startswith("argv:"):
        number = int(target.partition(":")[2])
        if number > len(arguments):
            what = f"there is no word {number} behind the script's name, where {len(arguments)} stand."
            raise InputError(what, where=target, remedy="Count them from 1.")
        return [Typed(number - 1, number, (), "", arguments[number - 1])]
    if FileTarget.read(target) is not None:
        return []
    return _overrides(target, arguments) or (_options(f"--{target}", arguments) if "." in target else [])


def with_target(target: str, arguments: Sequence[str], value: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the arguments with a value at a target, and a pair (old, new) for each change.

    Each place of the target changes in its own form. A target without a place is added, and its old is empty. An
    option is added behind all words before `--`, so that it belongs to the last subcommand. An override is added
    behind the last override, because argparse refuses a second group of them. A variable, or a value in a file,
    changes nothing.
    """
    words, changes = list(arguments), []
    for typed in reversed(typed_as(target, arguments)):
        new = typed.words(value)
        changes.append((" ".join(words[typed.begin : typed.end]), " ".join(new)))
        words[typed.begin : typed.end] = new
    if changes or FileTarget.read(target) is not None or is_variable(target, arguments):
        return words, changes[::-1]
    position, new = _added(target, arguments, value)
    return [*words[:position], *new, *words[position:]], [("", " ".join(new))]


def value_of(
    target: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> tuple[str, str] | None:
    """Returns the value of a target in a command, and its text there. None if the command does not set it.
    Raises InputError: the target names a word, or a value in a file, that does not exist.
    """
    if is_variable(target, arguments):
        return (environment[target], f"{target}={environment[target]}") if target in environment else None
    file = FileTarget.read(target)
    if file is not None:
        value = file.find(arguments, folder)[1]
        return value, f"{target}={value}"
    typed = typed_as(target, arguments)
    return (typed[-1].value, " ".join(arguments[typed[-1].begin : typed[-1].end])) if typed else None


def with_switch(place: str, arguments: Sequence[str], value: SwitchValue) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the arguments with a switch set, and a pair (old, new) for each change.

    A boolean sets an option without a value: the option is there, or it is not. If the option is typed with a
    boolean as its value, or by its negative form (`--no-compile`), that is changed. A variable, or a value in a
    file, changes nothing.
    """
    if value is None:
        return list(arguments), []
    if isinstance(value, bool) and is_option(place):
        return _with_flag(place, arguments, value)
    typed = typed_as(place, arguments)
    return with_target(place, arguments, text_of(value, typed[-1].value if typed else ""))


def without_option(option: str, arguments: Sequence[str]) -> list[str]:
    words = list(arguments)
    for typed in reversed(typed_as(option, arguments)):
        del words[typed.begin : typed.end]
    return words


def typed_switch(
    place: str, values: Iterable[SwitchValue], arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> SwitchValue:
    """Returns the value of a switch as the command was typed; None if the command does not set it.

    It is one of the given values if its text is. A boolean option that is not typed is off. Raises InputError: the
    place is a word, or a value in a file, that does not exist.
    """
    values = list(values)
    has_booleans = any(isinstance(value, bool) for value in values)
    if has_booleans and is_option(place):
        flags = _flags(place, arguments)
        if not flags:
            return False
        typed, is_negative = flags[-1]
        if is_negative or not _has_value(typed):
            return not is_negative
    found = value_of(place, arguments, environment, folder)
    if found is None:
        return None
    text = unquoted(found[0]) if FileTarget.read(place) is not None else found[0]
    own = next((value for value in values if not isinstance(value, bool) and str(value) == text), None)
    if own is not None:
        return own
    meant = boolean_of(text) if has_booleans else None
    return text if meant is None else meant


def same_place(one: str, other: str) -> bool:
    """`--batch-size` and `--batch_size` are one."""
    return spelling(one) == spelling(other) if is_option(one) and is_option(other) else one == other


def spelling(flag: str) -> str:
    """Returns an option as Hugging Face compares it, with underscores for the dashes within it."""
    return re.sub(r"(?<=\w)-", "_", flag)


def end_of_options(arguments: Sequence[str]) -> int:
    """Returns the position behind the last word that can be an option."""
    return list(arguments).index("--") if "--" in arguments else len(arguments)


def _options(flag: str, arguments: Sequence[str]) -> list[Typed]:
    found = []
    end = end_of_options(arguments)
    for position, word in enumerate(arguments[:end]):
        name, equals, value = word.partition("=")
        if spelling(name) == spelling(flag):
            following = arguments[position + 1] if position + 1 < end else "-"
            if equals:
                found.append(Typed(position, position + 1, (), f"{name}=", value))
            elif following.startswith("-") and not _NEGATIVE.match(following):
                found.append(Typed(position, position + 1, (word,), "", ""))
            else:
                found.append(Typed(position, position + 2, (word,), "", following))
        elif len(flag) == 2 and word.startswith(flag) and word[2:].isdecimal():
            found.append(Typed(position, position + 1, (), flag, word[2:]))
    return found


def _overrides(target: str, arguments: Sequence[str]) -> list[Typed]:
    key = target.lstrip("+")
    found = []
    for position, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if equals and name.lstrip("+") == key:
            found.append(Typed(position, position + 1, (), f"{name}=", value))
        elif word == key and "." in key and position + 1 < len(arguments):
            # yacs and its kind read overrides in two words: `SOLVER.IMS_PER_BATCH 16`.
            found.append(Typed(position, position + 2, (word,), "", arguments[position + 1]))
    return found


def _added(target: str, arguments: Sequence[str], value: str) -> tuple[int, list[str]]:
    end = end_of_options(arguments)
    if target.startswith("-"):
        # Some parsers read one form only, so the option gets the form of the others.
        long = [word for word in arguments[:end] if word.startswith("--")]
        is_joined = target.startswith("--") and any("=" in word for word in long)
        return end, [f"{target}={value}"] if is_joined else [target, value]
    overrides = [position for position, word in enumerate(arguments) if _AN_OVERRIDE.match(word)]
    return overrides[-1] + 1 if overrides else len(arguments), [f"{target}={value}"]


def _flags(flag: str, arguments: Sequence[str]) -> list[tuple[Typed, bool]]:
    name = flag.lstrip("-")
    negative = typed_as(f"--no-{name}", arguments) if flag.startswith("--") else []
    found = [*((typed, False) for typed in typed_as(flag, arguments)), *((typed, True) for typed in negative)]
    return sorted(found, key=lambda each: each[0].begin)


def _has_value(typed: Typed) -> bool:
    # Whether a flag is typed with a value. A word behind a flag without a value is another argument.
    return bool(typed.before) or boolean_of(typed.value) is not None


def _with_flag(flag: str, arguments: Sequence[str], is_on: bool) -> tuple[list[str], list[tuple[str, str]]]:
    words, changes = list(arguments), []
    found = _flags(flag, arguments)
    for typed, is_negative in reversed(found):
        end = typed.end if _has_value(typed) else typed.begin + 1
        old = words[typed.begin : end]
        if is_negative:
            new = [flag] if is_on else old
        elif _has_value(typed):
            new = typed.words(text_of(is_on, typed.value))
        else:
            new = old if is_on else []
        changes.append((" ".join(old), " ".join(new)))
        words[typed.begin : end] = new
    if found or not is_on:
        return words, changes[::-1]
    position = end_of_options(words)
    return [*words[:position], flag, *words[position:]], [("", flag)]


@dataclass(frozen=True)
class BatchPlace:
    key: str  # the key in DeepSpeed's configuration
    value: int  # its value
    shown: str  # the place with its value, as the user typed it


def batch_places(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    arg_mappings: Mapping[Any, str],
    folder: Path,
    wrapper: Sequence[str] = (),
) -> list[BatchPlace]:
    """Returns the batch keys that a command sets to a number.
    Raises InputError: a mapping names a word, or a value in a file, that does not exist.
    """
    of_wrapper = in_wrapper(arg_mappings, arguments, wrapper, folder)
    places = []
    for key, target in arg_mappings.items():
        words = wrapper if str(key) in of_wrapper else arguments
        value, shown = value_of(target, words, environment, folder) or ("", "")
        if value.isdecimal():
            places.append(BatchPlace(str(key), int(value), shown))
    return places


# The command of one trial: the user's, with the trial's DeepSpeed configuration, batch and switches in it.

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
    decided = {target: get_knob(config_values, key) for key, target in arg_mappings.items()}
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
            text, typed = target.find(arguments, folder, text)
            # 1 becomes 0.
            new = int(value) if isinstance(value, bool) and typed.isdecimal() else value
            texts[target.path] = first, edited(text, target.path, {target.keys: new}, shared=True)
    # A copy stands elsewhere.
    return {file: with_whole_paths(text, folder / file.path, folder) for file, text in texts.values()}


def _with_path(arguments: list[str], positions: Sequence[tuple[int, str]], path: Path) -> list[WordChange]:
    # Replaces the user's path in arguments, and keeps the text before it in each.
    changes = []
    for position, before in positions:
        changes.append((arguments[position].removeprefix(before), str(path)))
        arguments[position] = f"{before}{path}"
    return changes
