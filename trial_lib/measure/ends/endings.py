"""The ends of a trial's ranks, and their meaning for the program. Pure functions; standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass

ENDED, WAITS, FAILED, WORKS = "ended", "waits", "failed", "works"
"""The end of a rank's program: by itself, by a wait for others, or by a collective that has failed. Or it works."""

_SAME_BATCHES = "Give every rank equally many batches: make the data divisible by the ranks, or drop the rest."


class EndedEarlyError(Exception):
    """The program ended before enough steps were measured."""


class WaitsForEverError(Exception):
    """The ranks wait for each other."""


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank.

    Attributes:
        kind: `ENDED`, `WAITS`, `FAILED` or `WORKS`.
        micro_batches: that it has trained on.
        steps: its optimizer steps.
        counted: the steps that are measured.
        waits_in: the call in which it waits; empty if it does not wait.
        where: the line of the user's code in that call; empty if none is on the stack.
    """

    kind: str
    micro_batches: int = 0
    steps: int = 0
    counted: int = 0
    waits_in: str = ""
    where: str = ""

    @property
    def words(self) -> str:
        """Its state, such as `waits in all_reduce at train.py:46`."""
        if self.kind == ENDED:
            return "has ended"
        does = {WAITS: f"waits in {self.waits_in}", FAILED: "failed in a collective", WORKS: "works"}[self.kind]
        return f"{does} at {self.where}" if self.where else does


def are_uneven(ends: Sequence[RankEnd]) -> bool:
    """Returns whether ranks had different numbers of batches: one has ended, or had fewer, and others wait."""
    if all(end.kind == ENDED for end in ends):
        return False
    return any(end.kind == ENDED for end in ends) or len({end.micro_batches for end in ends}) > 1


def uneven_note(ends: Sequence[RankEnd]) -> str:
    """Returns a sentence on the steps that a measurement leaves out, because not all ranks have them."""
    had = _by_rank([f"had {end.micro_batches} micro-batches" for end in ends])
    return (
        f"The ranks have different numbers of batches: {had}. Only the steps that all of them have are measured. "
        f"A whole training may wait forever after these steps. {_SAME_BATCHES}"
    )


def too_little_data(ends: Sequence[RankEnd], needed: int, batch: tuple[int, int]) -> str:
    """Returns the sentences for ranks that had too few steps in common.

    Args:
        ends: of all ranks.
        needed: optimizer steps that a measurement takes.
        batch: the micro-batch size and the accumulation.
    """
    size = f"micro-batch {batch[0]} x accumulation {batch[1]}"
    steps = min(end.steps for end in ends)
    if not are_uneven(ends):
        return (
            f"The program ended after {steps} optimizer steps, before enough of them were measured. A "
            f"trial with {size} needs {needed}. Give it more data, or let it train longer."
        )
    said = _by_rank([f"had {end.micro_batches} micro-batches and {end.words}" for end in ends])
    return (
        f"The ranks have different numbers of batches: {said}. All ranks have {steps} optimizer steps in common, and "
        f"{size} needs {needed}. {_SAME_BATCHES}"
    )


def waits_for_ever(ends: Sequence[RankEnd], has_engine: bool) -> str:
    """Returns the sentences for ranks that all wait.

    Args:
        ends: of all ranks.
        has_engine: whether the program had built a DeepSpeed engine.
    """
    said = _by_rank([end.words for end in ends])
    if len(ends) == 1 or (not has_engine and len({end.waits_in for end in ends}) == 1):
        return (
            f"The program waits for ranks that do not exist: {said}. The trial has {len(ends)} "
            f"rank{'s' if len(ends) > 1 else ''}, without those that a program starts by itself. Let the launcher of "
            "the command start all of them."
        )
    cause = "Probably one of them has skipped the call in which the others wait, or has ended it."
    return f"The ranks wait for each other forever: {said}. {_SAME_BATCHES if are_uneven(ends) else cause}"


def _by_rank(words: Sequence[str]) -> str:
    """Returns the states of the ranks. Ranks with equal states are named together."""
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(words):
        ranks.setdefault(said, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))} {said}" for said, same in ranks.items()
    )
