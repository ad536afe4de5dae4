"""Finds out from a rank's record and log which memory it has run out of. Pure functions."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trial_lib.device.host.this_host import kind_of
from trial_lib.records.units import bytes_shown

# Each text was observed, or is in the source of torch, NCCL, DeepSpeed, Triton, bitsandbytes or the C library.

_OF_THE_HOST = (
    r"DefaultCPUAllocator: can't allocate memory"
    r"|\bMemoryError\b"
    r"|std::bad_alloc"
    r"|Unable to allocate .* for an array"
    r"|Cannot allocate memory"
    r"|is killed by signal: Killed"
)
# With the limit of a CPU's slot these fail for lack of memory. Elsewhere the cause is a thread limit, or a bug.
_OF_A_BUDGET = (
    r"can't start new thread"
    r"|RuntimeError: Resource temporarily unavailable"
    # oneDNN gives no reason. A convolution in a slot with almost no memory left ends with this.
    r"|could not create a primitive(?! descriptor)"
)
# A log has these words for nothing else. An exception may use others.
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
# A library could not start, or an assertion failed behind an allocation. The cause is memory if none was left.
_UNSURE = re.compile(
    r"\b(CUBLAS|CUBLASLT|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b"
    r"|handles_\.at\(i\) INTERNAL ASSERT FAILED"
    r"|INTERNAL ASSERT FAILED at \S*CUDACachingAllocator"
)
# A cuBLAS handle with its workspace takes some tens of megabytes. cuDNN and lazily loaded kernels take hundreds.
_NONE_LEFT_SHARE = 0.03
# CUDA reports a page that it cannot lock like a lack of the device's memory. torch's allocator for the device raises
# its own exception.
_PINS_HERE = re.compile(r"pin_memory|pin_empty|pinned", re.IGNORECASE)
_SAYS_IT_PINS = re.compile(r"in pin memory thread|cudaHost(Alloc|Register)|cuMemHost(Alloc|Register)")
_OF_THE_ALLOCATOR = "OutOfMemoryError"

# The other ranks show this when one rank has died. It is never the cause.
PEER_DIED = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout|failed to recv, got 0 bytes"
    r"|NCCL communicator was aborted|remote process exited|recvValue failed|Connection was likely closed"
)

_LONGEST_LINE = 300


class MemoryOwner(str, Enum):
    """The owner of the memory that has run out."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class MemoryLack:
    """The finding that a rank has run out of memory.

    Attributes:
        whose: the owner of that memory. The memory of a CPU's slot counts as the device's.
        said: the line that shows it.
    """

    whose: MemoryOwner
    said: str


def lack_of_memory(failure: dict[str, Any] | None, log_tail: str, device: str) -> MemoryLack | None:
    """Returns the memory that a rank has run out of. None if nothing shows that.

    In the recorded exception all the texts count. In the log only unmistakable texts count, because a warning may name
    memory too. The log counts if there is no recorded exception, or if it only shows the end of another rank.

    Args:
        failure: the exception that ended it, as `measure.rank` records it. None if there is no record.
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
    """Returns whether a device has memory of its own."""
    return not kind_of(device).computes_on_the_processor


def _in_other_words(text: str) -> MemoryLack | None:
    """Returns the words of an exception, without the lines of code that are shown with it."""
    lines = (line for line in text.splitlines() if not line[:1].isspace() and _OF_AN_EXCEPTION.search(line))
    return next((MemoryLack(MemoryOwner.DEVICE, line[:_LONGEST_LINE]) for line in lines), None)


def _pins(failure: dict[str, Any]) -> bool:
    """Returns whether the exception was raised while pages of the host were being locked."""
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
