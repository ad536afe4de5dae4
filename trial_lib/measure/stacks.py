"""What a thread does at the moment, read from its stack: where in the user's code, and whether it waits for others."""

import linecache
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trial_lib.measure.user_program import is_own_file

# Whoever stands in one of these, and does not move, waits for another process.
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
# By these one waits for a collective that was started before, or for a store. A lock, or an event, of Python itself is
# waited for in a frame of its own module.
_WAIT = re.compile(r"\b(wait|barrier|synchronize|get|TCPStore)\(")
_INSTALLED = ("/site-packages/", "/dist-packages/", "<frozen ", "<string>")


@dataclass(frozen=True)
class Doing:
    """What a thread does.

    Attributes:
        where: the line of the user's code, such as `train.py:46`; empty where none is on the stack.
        waits_in: the call in which it waits for other ranks, such as `all_reduce`; empty where it is not seen to.
    """

    where: str
    waits_in: str


def place_of(frame: FrameType) -> tuple[int, int, int]:
    """Returns what changes when a thread goes on, however little; cheap."""
    caller = frame.f_back
    return id(frame), frame.f_lasti, 0 if caller is None else caller.f_lasti


def doing(frame: FrameType, model_dir: Path, device_is_busy: bool = False) -> Doing:
    """Returns what a thread does.

    Args:
        frame: the innermost of its stack.
        model_dir: the folder of the user's code.
        device_is_busy: whether the thread's device has work left: what does not move then waits for that.
    """
    return Doing(_where(frame, model_dir), _waits_in(frame) or ("work of its device" if device_is_busy else ""))


def is_of_a_collective(error: BaseException) -> bool:
    """Returns whether an exception was raised by a call that waits for other ranks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and isinstance(error, RuntimeError) and bool(_waits_in(trace.tb_frame, trace.tb_lineno))


def _waits_in(frame: FrameType, line_number: int | None = None) -> str:
    inner: FrameType | None = frame
    called = ""
    while inner is not None and any(part in inner.f_code.co_filename for part in _COLLECTIVES):
        if not inner.f_code.co_name.startswith(("_", "<")) and inner.f_code.co_name not in ("wrapper", "log_wrapper"):
            called = inner.f_code.co_name
        inner = inner.f_back
    if called:
        return called
    line = linecache.getline(frame.f_code.co_filename, line_number or frame.f_lineno)
    found = _WAIT.search(line)
    return found[1] if found and not _is_of_python(frame) else ""


def _is_of_python(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names


def _where(frame: FrameType, model_dir: Path) -> str:
    own, other = f"{model_dir}/", ""
    link: FrameType | None = frame
    while link is not None:
        file = link.f_code.co_filename
        if not is_own_file(file) and not any(part in file for part in _INSTALLED):
            if file.startswith(own) or not file.startswith("/"):
                return f"{file.removeprefix(own)}:{link.f_lineno}"
            if not other and not _is_of_python(link):
                other = f"{file}:{link.f_lineno}"
        link = link.f_back
    return other
