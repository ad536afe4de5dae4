"""Lines of the user's own program, among those of libraries."""

import os
import sys
import traceback
from collections.abc import Iterable
from types import FrameType

from trial_lib.measure.ends.config_refusal import named_refusal
from trial_lib.measure.user_program import may_be_of_the_user
from trial_lib.wire.errors import InputError

_LIBRARY = f"{os.sep}lib{os.sep}python"
_OWN = f"{os.sep}trial_lib{os.sep}"
_MOST_CHARACTERS = 300


def is_of_program(path: str) -> bool:
    """Returns whether a file is the user's: neither Python's, nor a package's, nor ZeroTune's."""
    return may_be_of_the_user(path) and _LIBRARY not in path and _OWN not in path


def place_in_program() -> str:
    """Returns `FILE:LINE` of the innermost frame that is the user's; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_program(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def sentence_of(error: BaseException) -> str:
    """Returns what went wrong, with the last line of the user's own code that led to it.

    What DeepSpeed refuses is in its configuration, and not in the line.
    """
    if refused := named_refusal(error):
        return refused
    text = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    if type(error).__name__ == "CannotForeseeError":
        return said.split(": ", 1)[1]
    remedy = ""
    if isinstance(error, InputError):
        said, remedy = error.what, f" {error.remedy}"
    raised = reversed(list(traceback.walk_tb(error.__traceback__)))
    # Torch's own code may have called what has raised it, and the user's code torch.
    place = line_of(raised) or line_of(traceback.walk_stack(None))
    return f"{said[:_MOST_CHARACTERS].rstrip('.')}{place}.{remedy}"


def line_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns `, at FILE:LINE` of the first frame that may be the user's; empty if there is none."""
    for frame, line in frames:
        if is_of_program(frame.f_code.co_filename):
            return f", at {frame.f_code.co_filename}:{line}"
    return ""
