"""Which memory a rank has run out of, read from what it left behind. Pure."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trial_lib.device.host.this_host import kind_of
from trial_lib.records.units import bytes_shown

# Each text was seen, or stands in the source of torch, NCCL, DeepSpeed, Triton, bitsandbytes or the C library.

_OF_THE_HOST = (
    r"DefaultCPUAllocator: can't allocate memory"
    r"|\bMemoryError\b"
    r"|std::bad_alloc"
    r"|Unable to allocate .* for an array"
    r"|Cannot allocate memory"
    r"|is killed by signal: Killed"
)
# The limit of a CPU's slot lets these fail for want of memory. Elsewhere it is the number of threads, or a bug.
_OF_A_BUDGET = (
    r"can't start new thread"
    r"|RuntimeError: Resource temporarily unavailable"
    # oneDNN says no more of why it could not; a convolution of a slot whose memory is nearly full ends so.
    r"|could not create a primitive(?! descriptor)"
)
# Words that a log has for nothing else; an exception may use others.
_OF_THE_DEVICE = (
    r"OutOfMemoryError"
    r"|CUDA (driver )?(error: )?out of memory"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|Cuda failure (\d+ )?'out of memory'"
    r"|\bError out of memory at line \d+"
    r"|cudaErrorMemoryAllocation"
    r"|[A-Z]_ALLOC_FAILED|[A-Z]_ALLOCATION_FAILED"
)
_OUT_OF_MEMORY = {
    "cpu": (re.compile(f"{_OF_THE_HOST}|{_OF_A_BUDGET}"), re.compile(_OF_THE_DEVICE)),
    "cuda": (re.compile(_OF_THE_HOST), re.compile(_OF_THE_DEVICE)),
}
_OF_AN_EXCEPTION = re.compile(r"out of memory", re.IGNORECASE)
# A library that could not start, or an assertion behind a failed allocation: memory, if there was none left.
_UNSURE = re.compile(
    r"\b(CUBLAS|CUBLASLT|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b"
    r"|handles_\.at\(i\) INTERNAL ASSERT FAILED"
    r"|INTERNAL ASSERT FAILED at \S*CUDACachingAllocator"
)
# A handle of cuBLAS and its workspace take some tens of megabytes, cuDNN and lazily loaded kernels some hundreds.
_NONE_LEFT_SHARE = 0.03
# CUDA says the same of a page that it cannot lock as of one that the device has not got; torch's own allocator of the
# device has an exception of its own.
_PINS_HERE = re.compile(r"pin_memory|pin_empty|pinned", re.IGNORECASE)
_SAYS_IT_PINS = re.compile(r"in pin memory thread|cudaHost(Alloc|Register)|cuMemHost(Alloc|Register)")
_OF_THE_ALLOCATOR = "OutOfMemoryError"

# What the other ranks show when one has died: never the cause.
PEER_DIED = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout|failed to recv, got 0 bytes"
    r"|NCCL communicator was aborted|remote process exited|recvValue failed|Connection was likely closed"
)

_LONGEST_LINE = 300


class MemoryOwner(str, Enum):
    """Whose memory has run out."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class MemoryLack:
    """That a rank has run out of memory.

    Attributes:
        whose: what had none left. A CPU's slot has one memory: it is the device's.
        said: the line that shows it.
    """

    whose: MemoryOwner
    said: str


def lack_of_memory(failure: dict[str, Any] | None, log_tail: str, device: str) -> MemoryLack | None:
    """Returns the memory that a rank has run out of; None if nothing says that it has.

    The recorded exception says it in any words, the log in those alone that stand for nothing else: a warning may
    speak of memory as well. The log is asked where Python saw no exception, or another rank's end.

    Args:
        failure: the exception that ended it, as `measure.rank` records it; None if there is no record.
        log_tail: the last lines of its log.
        device: `cuda` or `cpu`.
    """
    if failure is not None:
        found = _lack_in(failure, device)
        if found is not None or not PEER_DIED.search(failure["message"]):
            return found
    return _lack_in_text(log_tail, device)


def _lack_in(failure: dict[str, Any], device: str) -> MemoryLack | None:
    message = f"{failure['type']}: {failure['message']}"
    for text in (message, failure["traceback"]):
        found = _lack_in_text(text, device) or _in_other_words(text)
        if found is not None:
            return MemoryLack(MemoryOwner.HOST, found.said) if _has_its_own(device) and _pins(failure) else found
    unsure = _UNSURE.search(message)
    left = failure.get("memory") or {}
    if unsure is not None and left.get("free", float("inf")) <= _NONE_LEFT_SHARE * left.get("total", 0):
        return MemoryLack(MemoryOwner.DEVICE, f"{_line_with(message, unsure.start())} {_left(left)}")
    return None


def _has_its_own(device: str) -> bool:
    """Returns whether a device has memory beside the host's."""
    return not kind_of(device).computes_on_the_processor


def _in_other_words(text: str) -> MemoryLack | None:
    """Returns what an exception says, whatever the code says that is shown with it, further in."""
    lines = (line for line in text.splitlines() if not line[:1].isspace() and _OF_AN_EXCEPTION.search(line))
    return next((MemoryLack(MemoryOwner.DEVICE, line[:_LONGEST_LINE]) for line in lines), None)


def _pins(failure: dict[str, Any]) -> bool:
    """Returns whether pages of the host were to be locked where the exception was raised."""
    last_frame = failure["traceback"].rpartition('  File "')[2]
    return failure["type"] != _OF_THE_ALLOCATOR and bool(
        _SAYS_IT_PINS.search(failure["message"]) or _PINS_HERE.search(last_frame)
    )


def _lack_in_text(text: str, device: str) -> MemoryLack | None:
    of_host, of_device = (pattern.search(text) for pattern in _OUT_OF_MEMORY[device])
    if of_host is not None:
        whose = MemoryOwner.HOST if _has_its_own(device) else MemoryOwner.DEVICE
        return MemoryLack(whose, _line_with(text, of_host.start()))
    return None if of_device is None else MemoryLack(MemoryOwner.DEVICE, _line_with(text, of_device.start()))


def _left(left: dict[str, int]) -> str:
    return f"The device had {bytes_shown(left['free'])} of {bytes_shown(left['total'])} free."


def _line_with(text: str, position: int) -> str:
    """Returns the line around a position."""
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : end if end >= 0 else None].strip()[:_LONGEST_LINE]
