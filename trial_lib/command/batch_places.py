"""Reads the mapped batch sizes off a command."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.command.file_targets import in_wrapper
from trial_lib.command.mapping_targets import value_of


@dataclass(frozen=True)
class BatchPlace:
    """A batch key that a command sets.

    Attributes:
        key: the key in DeepSpeed's configuration.
        value: its value.
        shown: the place with its value, as the user typed it.
    """

    key: str
    value: int
    shown: str


def batch_places(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    arg_mappings: Mapping[Any, str],
    folder: Path,
    wrapper: Sequence[str] = (),
) -> list[BatchPlace]:
    """Returns the batch keys that a command sets to a number.

    Args:
        arguments: the program's arguments.
        environment: the program's environment variables.
        arg_mappings: the place in the command that sets each DeepSpeed key.
        folder: the folder of the command's relative paths.
        wrapper: the words that the user typed, if they start the program's command.

    Raises:
        InputError: a mapping names a word, or a value in a file, that does not exist.
    """
    of_wrapper = in_wrapper(arg_mappings, arguments, wrapper, folder)
    places = []
    for key, target in arg_mappings.items():
        words = wrapper if str(key) in of_wrapper else arguments
        value, shown = value_of(target, words, environment, folder) or ("", "")
        if value.isdecimal():
            places.append(BatchPlace(str(key), int(value), shown))
    return places
