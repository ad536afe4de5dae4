"""Where a user has set the batch size: a number that stands in two places has to be the same in both."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trial_lib.experiment.entrypoint import is_flag
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.overrides import TRAINING_ARGUMENTS

# Hugging Face's, which many scripts have taken over.
_WELL_KNOWN = {key: f"--{name}" for key, name in TRAINING_ARGUMENTS.items()}


@dataclass(frozen=True)
class BatchPlace:
    """A batch key that is set outside of the DeepSpeed configuration.

    Attributes:
        key: of DeepSpeed's configuration.
        value: what it is set to.
        shown: the flag or variable with its value, as it was typed.
        is_mapped: whether `arg_mappings` says so; the others are well known.
    """

    key: str
    value: int
    shown: str
    is_mapped: bool


def batch_places(
    arguments: Sequence[str], environment: Mapping[str, str], arg_mappings: Mapping[Any, str]
) -> list[BatchPlace]:
    """Returns the batch keys that a command sets.

    Args:
        arguments: of the script.
        environment: what it finds in its environment.
        arg_mappings: the flag or the environment variable for each key.
    """
    places: list[BatchPlace] = []
    targets = [(key, target, True) for key, target in arg_mappings.items()]
    targets += [(key, flag, False) for key, flag in _WELL_KNOWN.items() if _spelling(flag) not in _spellings(targets)]
    for key, target, is_mapped in targets:
        value, shown = _in_arguments(arguments, target) if is_flag(target) else _in_environment(environment, target)
        if value.isdecimal():
            places.append(BatchPlace(str(key), int(value), shown, is_mapped))
    return places


def refuse_two_values(config: Mapping[str, Any], where: str, places: Sequence[BatchPlace]) -> None:
    """Refuses a batch key that is set in two places with two values; "auto" agrees with any.

    Args:
        config: the user's DeepSpeed configuration.
        where: how an error names it.
        places: what the command sets.

    Raises:
        InputError: it names both places, each with its value.
    """
    first: dict[str, tuple[int, str]] = {
        key: (value, f'"{key}": {value} in {where}') for key, value in config.items() if type(value) is int
    }
    for place in places:
        value, shown = first.setdefault(place.key, (place.value, f"{place.shown} in the command"))
        if value != place.value:
            raise InputError(
                f"{place.key} has two values: {shown}, and {place.shown} in the command.",
                where=where,
                remedy='Make them the same, or write "auto" in the DeepSpeed configuration.',
            )


def _in_arguments(arguments: Sequence[str], flag: str) -> tuple[str, str]:
    """Returns the value of a flag, and how it stands there; the last one counts."""
    found = ("", "")
    for position, word in enumerate(arguments):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if len(flag) == 2 and word.startswith(flag) and word[2:].isdecimal():
            found = word[2:], word
        elif _spelling(name) == _spelling(flag):
            following = arguments[position + 1] if position + 1 < len(arguments) else ""
            found = (value, word) if equals else (following, f"{word} {following}".rstrip())
    return found


def _in_environment(environment: Mapping[str, str], name: str) -> tuple[str, str]:
    value = environment.get(name, "")
    return value, f"{name}={value}"


def _spellings(targets: Sequence[tuple[Any, str, bool]]) -> set[str]:
    return {_spelling(target) for _, target, _ in targets}


def _spelling(flag: str) -> str:
    """Returns a flag as Hugging Face compares it: dashes within it are underscores."""
    return re.sub(r"(?<=\w)-", "_", flag)
