"""The ends of a trial's ranks, and their meaning for the program. Pure functions; standard library only."""

import contextlib
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from zerotune.trial_lib.deepspeed_config.refusals import refusal_behind, sentence_of
from zerotune.trial_lib.deepspeed_config.rules import ZERO_KEYS
from zerotune.trial_lib.device.cuda_variables import unread_architectures
from zerotune.trial_lib.rank.user_program import may_be_of_the_user

# The end of a rank's program: by itself, by a wait for others, or by a collective that has failed. Or it works.
ENDED, WAITS, FAILED, WORKS = "ended", "waits", "failed", "works"
_SAME_BATCHES = "Give every rank equally many batches: make the data divisible by the ranks, or drop the rest."


class EndedEarlyError(Exception):
    """The program ended before enough steps were measured."""


class WaitsForEverError(Exception):
    """The ranks wait for each other."""


@dataclass(frozen=True)
class RankEnd:
    kind: str  # `ENDED`, `WAITS`, `FAILED` or `WORKS`
    micro_batches: int = 0  # that it has trained on
    steps: int = 0  # its optimizer steps
    counted: int = 0  # the steps that are measured
    waits_in: str = ""  # the call in which it waits; empty if it does not wait
    where: str = ""  # the line of the user's code in that call; empty if none is on the stack

    @property
    def words(self) -> str:
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
    """Says which steps a measurement leaves out, because not all ranks have them."""
    had = _by_rank([f"had {end.micro_batches} micro-batches" for end in ends])
    return (
        f"The ranks have different numbers of batches: {had}. Only the steps that all of them have are measured. "
        f"A whole training may wait forever after these steps. {_SAME_BATCHES}"
    )


def too_little_data(ends: Sequence[RankEnd], needed: int, batch: tuple[int, int]) -> str:
    """Says that ranks had too few steps in common for a measurement. `batch`: micro-batch and accumulation."""
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
    """Says in which calls all ranks wait. `has_engine`: the program had built a DeepSpeed engine."""
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
    # The states of the ranks. Ranks with equal states are named together.
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(words):
        ranks.setdefault(said, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))} {said}" for said, same in ranks.items()
    )


# A thread's stack: the line of the user's code, and whether the thread waits for other ranks

# A thread that stays in one of these calls waits for another process.
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
# A thread in one of these calls waits for a collective that was started before, or for a store. Python's own locks and
# events wait in a frame of their own module.
_WAIT = re.compile(r"\b(wait|barrier|synchronize|get|TCPStore)\(")


@dataclass(frozen=True)
class Call:
    """One call on a stack at one moment."""

    file: str  # of its code
    function: str  # its name
    line: int  # of its code
    module: str  # its name
    place: tuple[int, int]  # a value that changes when the call goes on, however little


Stack = tuple[Call, ...]  # calls, the innermost one first


@dataclass(frozen=True)
class Doing:
    where: str  # the line of the user's code, such as `train.py:46`; empty if none is on the stack
    waits_in: str  # the call in which it waits for other ranks, such as `all_reduce`; empty if it does not seem to wait


def stack_of(thread: int) -> Stack:
    """A thread's calls; empty if it has ended.

    No frame is kept while the thread goes on, because it holds the tensors of its code. PyTorch does not tolerate that
    under a dispatch mode: a `FlopCounter` sometimes raises "Attempted to make a tensor into a differentiable view".
    """
    return tuple(_calls(sys._current_frames().get(thread)))


def place_of(stack: Stack) -> tuple[tuple[int, int], ...]:
    """A value that changes when a thread goes on, however little."""
    return tuple(call.place for call in stack[:2])


def doing(stack: Stack, model_dir: Path, device_is_busy: bool = False) -> Doing:
    """The state of a thread. One that does not move waits for its device, if that has work left."""
    return Doing(_where(stack, model_dir), _waits_in(stack) or ("work of its device" if device_is_busy else ""))


def is_of_a_collective(error: BaseException) -> bool:
    """Whether a call that waits for other ranks has raised the exception."""
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


# The key that DeepSpeed has refused. The exception carries a sentence on it into the rank's record.

_SENTENCE = "zerotune_refusal"
# What Python says when DeepSpeed reads an architecture.
_NO_NUMBER = "invalid literal for int()"
# What DeepSpeed says when it keeps parameters in buffers that it needs (partitioned_param_swapper.py, its issue 3062).
_NO_BUFFER = re.compile(r"Not enough buffers \d+ for swapping|already assigned swap buffer id")
_NO_BUFFER_SENTENCE = (
    "DeepSpeed keeps parameters from NVMe in buffers that it needs for others (its issue 3062). Set"
    " `stage3_max_live_parameters: 0` and `stage3_max_reuse_distance: 0`, so that it keeps none."
)
# The first is that of lines of DeepSpeed without words.
_RAN_OUT = re.compile(r"assert \w+_buffers is not None|ran out of swap buffers")
_NO_OPTIMIZER_BUFFER = (
    "DeepSpeed has too few buffers for an optimizer on NVMe. Set `buffer_count` of offload_optimizer to 4 or more, and"
    " to 8 or more with pipeline_read or pipeline_write."
)


@contextlib.contextmanager
def keys_named(ds_config: Any) -> Iterator[None]:
    """Attaches the result of `named_refusal` to an exception that the configuration causes."""
    try:
        yield
    except Exception as error:
        from torch import distributed

        slots = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        refusal = refusal_behind(error, ds_config, slots) if isinstance(ds_config, Mapping) else None
        if refusal is not None:
            import deepspeed

            what, remedy = sentence_of(refusal, f"DeepSpeed {deepspeed.__version__}", ZERO_KEYS, slots)
            # An exception of a C extension may have no attributes.
            with contextlib.suppress(AttributeError):
                setattr(error, _SENTENCE, f"{what} {remedy}")
        raise


def named_refusal(error: BaseException) -> str:
    """Returns what DeepSpeed has refused, the reason and the remedy; empty if unknown."""
    if isinstance(error, ValueError) and _NO_NUMBER in str(error) and (unread := unread_architectures(os.environ)):
        return unread
    if isinstance(error, AssertionError):
        if _NO_BUFFER.search(str(error)):
            return _NO_BUFFER_SENTENCE
        asserted = [place.line or "" for place in traceback.extract_tb(error.__traceback__)[-1:]]
        if _RAN_OUT.search(" ".join([*asserted, str(error)])):
            return _NO_OPTIMIZER_BUFFER
    return str(getattr(error, _SENTENCE, ""))
