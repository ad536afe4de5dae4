"""The facts about a program that say which switches ZeroTune can turn."""

from typing import Any, Protocol


class TurnableFacts(Protocol):
    """As `ProgramProfile` explains them."""

    turnable: dict[str, list[Any]]
    not_turnable: dict[str, str]
