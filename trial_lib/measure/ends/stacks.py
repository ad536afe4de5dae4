"""What a thread does at the moment, read from its stack: where in the user's code, and whether it waits for others."""

import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from trial_lib.measure.user_program import may_be_of_the_user

# Whoever stands in one of these, and does not move, waits for another process.
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
# By these one waits for a collective that was started before, or for a store. A lock, or an event, of Python itself is
# waited for in a frame of its own module.
_WAIT = re.compile(r"\b(wait|barrier|synchronize|get|TCPStore)\(")


@dataclass(frozen=True)
class Call:
    """One call on a stack, as it was at a moment.

    Attributes:
        file: of its code.
        function: its name.
        line: that it stands at.
        module: its name.
        place: what is another one when the call goes on, however little.
    """

    file: str
    function: str
    line: int
    module: str
    place: tuple[int, int]


Stack = tuple[Call, ...]
"""Calls, the innermost one first."""


@dataclass(frozen=True)
class Doing:
    """What a thread does.

    Attributes:
        where: the line of the user's code, such as `train.py:46`; empty where none is on the stack.
        waits_in: the call in which it waits for other ranks, such as `all_reduce`; empty where it is not seen to.
    """

    where: str
    waits_in: str


def stack_of(thread: int) -> Stack:
    """Returns the stack of a thread; empty where the thread is none any more.

    No frame is held on to while the thread goes on. A frame holds the tensors of its code, and PyTorch does not bear it
    during an operation that a dispatch mode sees: under a `FlopCounter` that ends in "Attempted to make a tensor into a
    differentiable view", now and then.
    """
    return tuple(_calls(sys._current_frames().get(thread)))


def place_of(stack: Stack) -> tuple[tuple[int, int], ...]:
    """Returns what changes when a thread goes on, however little."""
    return tuple(call.place for call in stack[:2])


def doing(stack: Stack, model_dir: Path, device_is_busy: bool = False) -> Doing:
    """Returns what a thread does.

    Args:
        stack: the thread's.
        model_dir: the folder of the user's code.
        device_is_busy: whether the thread's device has work left: what does not move then waits for that.
    """
    return Doing(_where(stack, model_dir), _waits_in(stack) or ("work of its device" if device_is_busy else ""))


def is_of_a_collective(error: BaseException) -> bool:
    """Returns whether an exception was raised by a call that waits for other ranks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, RuntimeError):
        return False
    raised, *callers = _calls(trace.tb_frame)
    return bool(_waits_in((replace(raised, line=trace.tb_lineno), *callers)))


def _calls(frame: FrameType | None) -> Iterator[Call]:
    while frame is not None:
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        yield Call(code.co_filename, code.co_name, frame.f_lineno, module, (id(frame), frame.f_lasti))
        frame = frame.f_back


def _waits_in(stack: Stack) -> str:
    called = ""
    for call in stack:
        if not any(part in call.file for part in _COLLECTIVES):
            break
        if not call.function.startswith(("_", "<")) and call.function not in ("wrapper", "log_wrapper"):
            called = call.function
    if called or not stack:
        return called
    found = _WAIT.search(linecache.getline(stack[0].file, stack[0].line))
    return found[1] if found and not _is_of_python(stack[0]) else ""


def _is_of_python(call: Call) -> bool:
    return call.module.partition(".")[0] in sys.stdlib_module_names


def _where(stack: Stack, model_dir: Path) -> str:
    own, other = f"{model_dir}/", ""
    for call in stack:
        if may_be_of_the_user(call.file):
            if call.file.startswith(own) or not call.file.startswith("/"):
                return f"{call.file.removeprefix(own)}:{call.line}"
            if not other and not _is_of_python(call):
                other = f"{call.file}:{call.line}"
    return other
