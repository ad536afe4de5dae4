"""Places in the user's command that hold a value: the targets of `arg_mappings`, and the switches of a program."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trial_lib.command.file_targets import FILE_TARGET, FileTarget, unquoted
from trial_lib.command.switches import SwitchValue, boolean_of, is_option, text_of
from trial_lib.wire.errors import InputError
from trial_lib.wire.turned import TURNED_PLACE

_KEY = r"[A-Za-z_][\w-]*(\.[\w-]+)*"
_OPTION, _VARIABLE, _WORD = r"--?[A-Za-z][^\s=]*", r"[A-Za-z_]\w*", r"argv:[1-9]\d*"
_OVERRIDE = rf"\+{{1,2}}{_KEY}|[A-Za-z_][\w-]*(\.[\w-]+)+"
MAPPING_TARGET = rf"^({_OPTION}|{_VARIABLE}|{_OVERRIDE}|{FILE_TARGET}|{_WORD})$"
"""An option, an environment variable, an override `key=value`, a value in a file, or a word by its number."""
PLACES = (
    "an option (--batch-size), an environment variable (BATCH), an override (trainer.batch), a value in a file of the "
    "command (conf.yaml:trainer.batch), or a word by its number (argv:2)"
)
"""The places, as a message names them."""
SWITCH_PLACE = rf"{MAPPING_TARGET}|^{TURNED_PLACE}$"
"""A place of a switch: a target, or the name of a switch that ZeroTune turns."""

_AN_OVERRIDE = re.compile(rf"[+~]{{0,2}}{_KEY}=")
_NEGATIVE = re.compile(r"-\.?\d")


@dataclass(frozen=True)
class Typed:
    """One place of a target in the command.

    Attributes:
        begin: the position of its first word among the program's arguments.
        end: the position behind its last word.
        name: the words before the word with the value.
        before: the text before the value in that word.
        value: the value as the user typed it. Empty if there is none.
    """

    begin: int
    end: int
    name: tuple[str, ...]
    before: str
    value: str

    def words(self, value: str) -> list[str]:
        """Returns the words that set another value in the same form."""
        return [*self.name, f"{self.before}{value}"]


def is_plain_name(place: str) -> bool:
    """Returns whether a place is a name without dots: an environment variable, unless an argument has that name."""
    return re.fullmatch(_VARIABLE, place) is not None


def is_variable(target: str, arguments: Sequence[str]) -> bool:
    """Returns whether a target is an environment variable: a plain name without an argument `name=value`.

    Args:
        target: a target of `arg_mappings`.
        arguments: the program's arguments.
    """
    return is_plain_name(target) and not typed_as(target, arguments)


def typed_as(target: str, arguments: Sequence[str]) -> list[Typed]:
    """Returns the places of a target among a program's arguments, in order. Most parsers use the last one.

    Args:
        target: a target of `arg_mappings`. A variable, or a value in a file, has no place there.
        arguments: the program's arguments.

    Raises:
        InputError: the target is a word by its number, and there are fewer words.
    """
    if target.startswith("-"):
        return _options(target, arguments)
    if target.startswith("argv:"):
        return [_word(int(target.partition(":")[2]), arguments)]
    if FileTarget.read(target) is not None:
        return []
    return _overrides(target, arguments) or (_options(f"--{target}", arguments) if "." in target else [])


def with_target(target: str, arguments: Sequence[str], value: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns a program's arguments with a value at a target, and a pair (old, new) for each change.

    Each place of the target changes in its own form. A target without a place is added, and its old is empty. An option
    is added behind all words before `--`, so that it belongs to the last subcommand. An override is added behind the
    last override, because argparse refuses a second group of them.

    Args:
        target: a target of `arg_mappings`. A variable, or a value in a file, changes nothing here.
        arguments: the program's arguments.
        value: the value to set.
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

    Args:
        target: a target of `arg_mappings`.
        arguments: the program's arguments.
        environment: the program's environment variables.
        folder: the folder of relative paths.

    Raises:
        InputError: the target names a word, or a value in a file, that does not exist.
    """
    if is_variable(target, arguments):
        return (environment[target], f"{target}={environment[target]}") if target in environment else None
    file = FileTarget.read(target)
    if file is not None:
        value = file.find(arguments, folder).text
        return value, f"{target}={value}"
    typed = typed_as(target, arguments)
    return (typed[-1].value, " ".join(arguments[typed[-1].begin : typed[-1].end])) if typed else None


def with_switch(place: str, arguments: Sequence[str], value: SwitchValue) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns a program's arguments with a switch set, and a pair (old, new) for each change.

    A boolean sets an option without a value: the option is there, or it is not. If the option is typed with a boolean
    as its value, or by its negative form (`--no-compile`), that is changed.

    Args:
        place: of the switch. A variable, or a value in a file, changes nothing here.
        arguments: the program's arguments.
        value: the value to set.
    """
    if value is None:
        return list(arguments), []
    if isinstance(value, bool) and is_option(place):
        return _with_flag(place, arguments, value)
    typed = typed_as(place, arguments)
    return with_target(place, arguments, text_of(value, typed[-1].value if typed else ""))


def without_option(option: str, arguments: Sequence[str]) -> list[str]:
    """Returns a program's arguments without an option that takes a value, and without its value."""
    words = list(arguments)
    for typed in reversed(typed_as(option, arguments)):
        del words[typed.begin : typed.end]
    return words


def typed_switch(
    place: str, values: Iterable[SwitchValue], arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> SwitchValue:
    """Returns the value of a switch as the command was typed; None if the command does not set it.

    It is one of the given values if its text is. A boolean option that is not typed is off.

    Args:
        place: of the switch.
        values: those that the search tries.
        arguments: the program's arguments.
        environment: the program's environment variables.
        folder: the folder of relative paths.

    Raises:
        InputError: the place is a word, or a value in a file, that does not exist.
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
    """Returns whether two places are one, such as `--batch-size` and `--batch_size`."""
    return spelling(one) == spelling(other) if is_option(one) and is_option(other) else one == other


def spelling(flag: str) -> str:
    """Returns an option as Hugging Face compares it, with underscores for the dashes within it."""
    return re.sub(r"(?<=\w)-", "_", flag)


def end_of_options(arguments: Sequence[str]) -> int:
    """Returns the position behind the last word that can be an option."""
    return list(arguments).index("--") if "--" in arguments else len(arguments)


def _word(number: int, arguments: Sequence[str]) -> Typed:
    if number > len(arguments):
        raise InputError(
            f"there is no word {number} behind the script's name, where {len(arguments)} stand.",
            where=f"argv:{number}",
            remedy="Count them from 1.",
        )
    return Typed(number - 1, number, (), "", arguments[number - 1])


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
    """Returns the position of a target that is added, and its words."""
    end = end_of_options(arguments)
    if target.startswith("-"):
        # Some parsers read one form only, so the option gets the form of the others.
        long = [word for word in arguments[:end] if word.startswith("--")]
        is_joined = target.startswith("--") and any("=" in word for word in long)
        return end, [f"{target}={value}"] if is_joined else [target, value]
    overrides = [position for position, word in enumerate(arguments) if _AN_OVERRIDE.match(word)]
    return overrides[-1] + 1 if overrides else len(arguments), [f"{target}={value}"]


def _flags(flag: str, arguments: Sequence[str]) -> list[tuple[Typed, bool]]:
    """Returns the places of a flag and of its negative form in order, and whether each is the negative one."""
    name = flag.lstrip("-")
    negative = typed_as(f"--no-{name}", arguments) if flag.startswith("--") else []
    found = [*((typed, False) for typed in typed_as(flag, arguments)), *((typed, True) for typed in negative)]
    return sorted(found, key=lambda each: each[0].begin)


def _has_value(typed: Typed) -> bool:
    """Returns whether a flag is typed with a value. A word behind a flag without a value is another argument."""
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
