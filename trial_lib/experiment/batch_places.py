"""Where a user has set the batch size: a number that stands in two places has to be the same in both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.experiment.errors import InputError
from trial_lib.experiment.mapping_targets import spelling, value_of
from trial_lib.experiment.overrides import TRAINING_ARGUMENTS

# Hugging Face's, which many scripts have taken over.
_WELL_KNOWN = {key: f"--{name}" for key, name in TRAINING_ARGUMENTS.items()}


@dataclass(frozen=True)
class BatchPlace:
    """A batch key that is set outside of the DeepSpeed configuration.

    Attributes:
        key: of DeepSpeed's configuration.
        value: what it is set to.
        shown: the place with its value, as it was typed.
        is_mapped: whether `arg_mappings` says so; the others are well known.
    """

    key: str
    value: int
    shown: str
    is_mapped: bool


def batch_places(
    arguments: Sequence[str], environment: Mapping[str, str], arg_mappings: Mapping[Any, str], folder: Path
) -> list[BatchPlace]:
    """Returns the batch keys that a command sets.

    Args:
        arguments: of the script.
        environment: what it finds in its environment.
        arg_mappings: what in the command sets each DeepSpeed key.
        folder: what relative paths in the command stand in.

    Raises:
        InputError: a mapping names a word or a value in a file that is not there.
    """
    places: list[BatchPlace] = []
    targets = [(key, target, True) for key, target in arg_mappings.items()]
    mapped = {spelling(target) for target in arg_mappings.values()}
    targets += [(key, flag, False) for key, flag in _WELL_KNOWN.items() if spelling(flag) not in mapped]
    for key, target, is_mapped in targets:
        value, shown = value_of(target, arguments, environment, folder) or ("", "")
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
