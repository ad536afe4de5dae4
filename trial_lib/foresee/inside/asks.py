"""The record of numbers that code asks of fake tensors, and the answers to its checks."""

import dis
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from trial_lib.foresee.inside.known_askers import FINITE, KnownAsker, known
from trial_lib.wire.foreseen_run import Ask

LIKELY = "_foreseen_likely"
"""Marks a tensor by which a program checks its numbers. An unknown asker of it gets yes."""

_OWN_CODE = "/trial_lib/"
# Instructions between the one that asks and the jump by its answer. Versions of Python differ.
_HAND_ON = frozenset(
    (
        "CACHE",
        "CALL",
        "CALL_FUNCTION",
        "CALL_METHOD",
        "CALL_KW",
        "CALL_FUNCTION_EX",
        "PRECALL",
        "TO_BOOL",
        "EXTENDED_ARG",
    )
)
_OWN = ("/trial_lib/foresee/", "/trial_lib/measure/", "/torch/")


class CannotForeseeError(Exception):
    """The program does something that fake tensors cannot. The message is a sentence."""


class Asks:
    """Answers, and counts who asked."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str, bool]] = Counter()

    def answer(self, question: str, dtype: torch.dtype, is_likely: bool = False) -> Any:
        """Returns a number in place of the unknown one.

        Args:
            question: the operator.
            dtype: of the number that the code expects.
            is_likely: whether an unknown asker gets yes.
        """
        frame = _asker()
        row = _row_of(frame)
        answer: Any = _default(question, dtype) if row is None else row.answer
        if row is None or row.answer is FINITE:
            passing = _passing_answer(frame) if dtype == torch.bool else None
            if passing is not None:
                answer = passing
            elif is_likely:
                answer = True
        if question == "item":
            answer = _of_type(answer, dtype)
        self._count(frame, question, answer, row is not None)
        return answer

    def chooses_all(self) -> bool:
        """Returns whether a known asker chooses by an unknown mask, which chooses all in a healthy training."""
        frame = _asker()
        row = _row_of(frame)
        if row is None or row.answer is not True:
            return False
        self._count(frame, "mask", True, True)
        return True

    def choice(self, question: str, among: int) -> Callable[[], None] | None:
        """Returns what counts a use of a choice, each of which is taken equally often.

        Args:
            question: the operator that chooses.
            among: the number of choices.

        Returns:
            None for a known asker, which has answers of its own.
        """
        frame = _asker()
        if _row_of(frame) is not None:
            return None
        row = _named(frame), question, f"each of {among} equally often", False

        def count() -> None:
            self._counts[row] += 1

        return count

    def _count(self, frame: FrameType, question: str, answer: Any, is_known: bool) -> None:
        self._counts[_named(frame), question, str(answer), is_known] += 1

    def record(self) -> tuple[Ask, ...]:
        """Returns the asks so far, those of unknown askers first."""
        rows = sorted(self._counts.items(), key=lambda row: (row[0][3], -row[1]))
        return tuple(
            Ask(asker=asker, question=question, answer=answer, is_known=is_known, count=count)
            for (asker, question, answer, is_known), count in rows
        )


def _default(question: str, dtype: torch.dtype) -> Any:
    if question == "equal":
        return True
    return FINITE if dtype.is_floating_point else 0


def _of_type(answer: Any, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        # A number that means "finite" is no answer to a yes or no.
        return answer is True
    if dtype.is_complex:
        return complex(answer)
    return float(answer) if dtype.is_floating_point else int(answer)


def _named(asker: FrameType) -> str:
    return f"{asker.f_code.co_name} ({_shown(asker.f_code.co_filename)}:{asker.f_lineno})"


def _row_of(frame: FrameType) -> KnownAsker | None:
    return known(frame.f_code.co_filename, frame.f_code.co_name)


def _asker() -> FrameType:
    """Returns the frame that asks: the innermost that is neither torch's nor ZeroTune's."""
    frame: FrameType | None = sys._getframe(2)
    last = frame
    while frame is not None:
        last = frame
        name = frame.f_code.co_filename
        if "/torch/" in name and _row_of(frame) is not None:
            return frame
        if not name.startswith("<") and not any(part in name for part in _OWN):
            return frame
        frame = frame.f_back
    assert last is not None
    return last


def _passing_answer(asker: FrameType) -> bool | None:
    """Returns the yes or no by which code raises no error, because a healthy training passes its checks.

    Returns:
        None if neither answer leads to an error at once, or if both do.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _OWN_CODE in frame.f_code.co_filename:
        frame = frame.f_back
    # Torch may ask in the asker's name, as `torch._assert` does.
    for each in (frame, asker):
        found = None if each is None else _without_error(each.f_code, each.f_lasti)
        if found is not None:
            return found
    return None


@functools.cache
def _without_error(code: CodeType, offset: int) -> bool | None:
    """Returns the truth of the value at an instruction by which the code jumps past an error; None without one."""
    instructions = list(dis.get_instructions(code))
    places = {each.offset: place for place, each in enumerate(instructions)}
    place = places.get(offset)
    while place is not None and place < len(instructions) and instructions[place].opname in _HAND_ON:
        place += 1
    if place is None or place + 1 >= len(instructions):
        return None
    jump = instructions[place]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    known: dict[int, bool] = {}
    fails_there, fails_here = (_raises(instructions, places, at, known) for at in (places[jump.argval], place + 1))
    if fails_there == fails_here:
        return None
    return fails_here == jump.opname.endswith("IF_TRUE")


def _raises(
    instructions: Sequence[dis.Instruction], places: Mapping[int, int], at: int, known: dict[int, bool]
) -> bool:
    """Returns whether code comes to a `raise` on each of its ways, and goes back on none.

    Args:
        instructions: of a function.
        places: of the instructions, by offset.
        at: where to begin.
        known: answers so far.
    """
    for place in range(at, len(instructions)):
        if place in known:
            return known[place]
        each = instructions[place]
        if each.opname == "RAISE_VARARGS":
            return True
        if each.opname.startswith(("RETURN", "YIELD", "FOR_ITER", "SEND")):
            return False
        if "JUMP" in each.opname:
            target = places.get(each.argval, 0)
            found = target > place and _raises(instructions, places, target, known)
            if found and "_IF_" in each.opname:
                found = _raises(instructions, places, place + 1, known)
            known[place] = found
            return found
    return False


def _shown(path: str) -> str:
    """Returns a path from the package on, or the last two parts of another."""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in path:
            return path.split(mark, 1)[1]
    return path
