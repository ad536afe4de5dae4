"""Switches of the user's program: settings that a search varies beside those of DeepSpeed.

A switch has the name of its place in the command, as `--map` names it: an option, an environment variable, an override,
a value in a file, a word by its number. See `mapping_targets` for the places.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trial_lib.command.file_targets import FileTarget
from trial_lib.command.mapping_targets import Typed, end_of_options, spelling, typed_as, value_of, with_target

PROGRAM = "program"
"""The section of a candidate's knobs that has the switches, by their places. DeepSpeed has no such key."""

SwitchValue = bool | int | float | str | None
"""The value of a switch. None leaves its place as typed. A boolean option is there or not, if it takes no value."""

_WORDS = (("true", "false"), ("yes", "no"), ("on", "off"), ("1", "0"))


def is_switch(path: str) -> bool:
    """Returns whether the path of a knob is that of a switch."""
    return path.startswith(f"{PROGRAM}.")


def path_of(place: str) -> str:
    """Returns the path of a switch among a candidate's knobs."""
    return f"{PROGRAM}.{place}"


def place_of(path: str) -> str:
    """Returns the place of a switch by its path among a candidate's knobs. Another path stays as it is."""
    return path.removeprefix(f"{PROGRAM}.")


def switches_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the switches among some settings, by their places."""
    return dict(settings.get(PROGRAM) or {})


def deepspeed_part(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns some settings without the switches: the part that DeepSpeed reads."""
    return {key: value for key, value in settings.items() if key != PROGRAM}


def is_option(place: str) -> bool:
    """Returns whether a place is an option."""
    return place.startswith("-")


def shown_switch(place: str, value: SwitchValue) -> str:
    """Returns a switch as people read it, such as `--compile`, `no --compile` or `OMP_NUM_THREADS=2`."""
    if value is None:
        return f"{place} as typed"
    if isinstance(value, bool) and is_option(place):
        return place if value else f"no {place}"
    return f"{place}={text_of(value)}"


def text_of(value: SwitchValue, typed: str = "") -> str:
    """Returns the text of a value in a command. A boolean follows the typed one: `True` becomes `False`, 1 becomes 0.

    Args:
        value: the value.
        typed: the text in its place, as typed. Empty if there is none.
    """
    if not isinstance(value, bool):
        return str(value)
    pair = next((pair for pair in _WORDS if typed.lower() in pair), _WORDS[0])
    word = pair[0] if value else pair[1]
    return word.upper() if typed.isupper() and len(typed) > 1 else word.capitalize() if typed[:1].isupper() else word


def boolean_of(text: str) -> bool | None:
    """Returns the boolean that a text in a command means; None if it means none."""
    return next((text.lower() == pair[0] for pair in _WORDS if text.lower() in pair), None)


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


def text_in_file(place: str, value: SwitchValue, typed: str) -> str:
    """Returns the text of a value in a YAML or JSON file, quoted if it would not read back as text.

    Args:
        place: the place, which names the file.
        value: the value to set.
        typed: the text of the value there now.
    """
    text = text_of(value, typed)
    if not isinstance(value, str):
        return text.lower() if isinstance(value, bool) else text
    file = FileTarget.read(place)
    if file is not None and file.path.endswith(".json"):
        return json.dumps(value)
    try:
        is_plain = bool(yaml.safe_load(text) == value) and not re.search(r"[#,\[\]{}\n]|:\s|^\s|\s$", text)
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(value)


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
    text = _unquoted(found[0]) if FileTarget.read(place) is not None else found[0]
    own = next((value for value in values if not isinstance(value, bool) and str(value) == text), None)
    if own is not None:
        return own
    meant = boolean_of(text) if has_booleans else None
    return text if meant is None else meant


def _unquoted(text: str) -> str:
    """Returns the text that a scalar of YAML or JSON means."""
    try:
        loaded = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return text
    return loaded if isinstance(loaded, str) else text


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


def same_place(one: str, other: str) -> bool:
    """Returns whether two places are one, such as `--batch-size` and `--batch_size`."""
    return spelling(one) == spelling(other) if is_option(one) and is_option(other) else one == other
