"""How large a batch a command says that it is, where that is mapped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.command.mapping_targets import value_of


@dataclass(frozen=True)
class BatchPlace:
    """A batch key that a command sets.

    Attributes:
        key: of DeepSpeed's configuration.
        value: what it is set to.
        shown: the place with its value, as it was typed.
    """

    key: str
    value: int
    shown: str


def batch_places(
    arguments: Sequence[str], environment: Mapping[str, str], arg_mappings: Mapping[Any, str], folder: Path
) -> list[BatchPlace]:
    """Returns the batch keys that a command sets to a number.

    Args:
        arguments: of the program.
        environment: what it finds in its environment.
        arg_mappings: what in the command sets each DeepSpeed key.
        folder: what relative paths in the command stand in.

    Raises:
        InputError: a mapping names a word or a value in a file that is not there.
    """
    places = []
    for key, target in arg_mappings.items():
        value, shown = value_of(target, arguments, environment, folder) or ("", "")
        if value.isdecimal():
            places.append(BatchPlace(str(key), int(value), shown))
    return places
