"""The values that a switch can have in a program."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Found:
    """The values that a switch can have in one program.

    Attributes:
        values: the program's own first. Empty if ZeroTune cannot turn the switch.
        reason: why it cannot, in words that follow "has no effect: ".
    """

    values: tuple[Any, ...] = ()
    reason: str = ""

    @classmethod
    def of(cls, own: Any, values: tuple[Any, ...]) -> "Found":
        """Returns values with the program's own first."""
        return cls((own, *(value for value in values if value != own)))
