"""Reads a thread's stack: the line of the user's code, and whether the thread waits for other ranks."""

import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from trial_lib.measure.user_program import may_be_of_the_user

# A thread that stays in one of these calls waits for another process.
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
# A thread in one of these calls waits for a collective that was started before, or for a store. Python's own locks and
# events wait in a frame of their own module.
_WAIT = re.compile(r"\b(wait|barrier|synchronize|get|TCPStore)\(")


@dataclass(frozen=True)
class Call:
    """One call on a stack at one moment.

    Attributes:
        file: of its code.
        function: its name.
        line: of its code.
        module: its name.
        place: a value that changes when the call goes on, however little.
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
    """The state of a thread.

    Attributes:
        where: the line of the user's code, such as `train.py:46`; empty if none is on the stack.
        waits_in: the call in which it waits for other ranks, such as `all_reduce`; empty if it does not seem to wait.
    """

    where: str
    waits_in: str


def stack_of(thread: int) -> Stack:
    """Returns the stack of a thread; empty if the thread has ended.

    This keeps no reference to a frame while the thread goes on, because a frame holds the tensors of its code. PyTorch
    does not tolerate that during an operation that a dispatch mode sees. Under a `FlopCounter` it sometimes raises
    "Attempted to make a tensor into a differentiable view".
    """
    return tuple(_calls(sys._current_frames().get(thread)))


def place_of(stack: Stack) -> tuple[tuple[int, int], ...]:
    """Returns a value that changes when a thread goes on, however little."""
    return tuple(call.place for call in stack[:2])


def doing(stack: Stack, model_dir: Path, device_is_busy: bool = False) -> Doing:
    """Returns the state of a thread.

    Args:
        stack: the thread's.
        model_dir: the folder of the user's code.
        device_is_busy: whether the thread's device has work left. A thread that does not move then waits for the
            device.
    """
    return Doing(_where(stack, model_dir), _waits_in(stack) or ("work of its device" if device_is_busy else ""))


def is_of_a_collective(error: BaseException) -> bool:
    """Returns whether a call that waits for other ranks has raised an exception."""
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
        # Dynamo runs code in which some instructions have no line.
        yield Call(code.co_filename, code.co_name, frame.f_lineno or 0, module, (id(frame), frame.f_lasti))
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
