"""Lines of the user's own program, among those of libraries."""

import os
import sys
from types import FrameType

from trial_lib.measure.user_program import may_be_of_the_user

_LIBRARY = f"{os.sep}lib{os.sep}python"
_OWN = f"{os.sep}trial_lib{os.sep}"


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
