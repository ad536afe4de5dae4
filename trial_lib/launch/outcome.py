"""The outcome of a trial, from the records and logs of its ranks."""

import contextlib
import json
import re
import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.launch.processes.supervisor import CANCEL, DEADLINE, REPLACED, STOPPED
from zerotune.trial_lib.launch.rank_starter import GUARD, HOST, ProcessesEnd
from zerotune.trial_lib.messages.measurement import Measurement, ProgramProfile, RankFailure
from zerotune.trial_lib.messages.orders import ANOTHER_HAS_FAILED, SENDS
from zerotune.trial_lib.records.result import Outcome, as_sentence
from zerotune.trial_lib.records.units import bytes_shown

# Finds out from a rank's record and log which memory it has run out of.

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
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class MemoryLack:
    whose: MemoryOwner  # the owner of that memory. The memory of a CPU's slot counts as the device's.
    said: str  # the line that shows it


def lack_of_memory(failure: RankFailure | None, log_tail: str, device: str) -> MemoryLack | None:
    """Returns the memory that a rank has run out of. None if nothing shows that.

    In the recorded exception all the texts count. In the log only unmistakable texts count, because a warning may name
    memory too. The log counts if there is no recorded exception, or if it only shows the end of another rank.
    """
    if failure is not None:
        found = _lack_in(failure, device)
        if found is not None or not PEER_DIED.search(failure.message):
            return found
    return _lack_in_text(log_tail, device)


def _lack_in(failure: RankFailure, device: str) -> MemoryLack | None:
    message = f"{failure.type}: {failure.message}"
    for text in (message, failure.traceback):
        found = _lack_in_text(text, device) or _in_other_words(text)
        if found is not None:
            return MemoryLack(MemoryOwner.HOST, found.said) if _has_its_own(device) and _pins(failure) else found
    unsure = _UNSURE.search(message)
    left = failure.memory
    if unsure is not None and left.get("free", float("inf")) <= _NONE_LEFT_SHARE * left.get("total", 0):
        free = f"The device had {bytes_shown(left['free'])} of {bytes_shown(left['total'])} free."
        return MemoryLack(MemoryOwner.DEVICE, f"{_line_with(message, unsure.start())} {free}")
    return None


def _has_its_own(device: str) -> bool:
    return not kind_of(device).computes_on_the_processor


def _in_other_words(text: str) -> MemoryLack | None:
    lines = (line for line in text.splitlines() if not line[:1].isspace() and "out of memory" in line.lower())
    return next((MemoryLack(MemoryOwner.DEVICE, line[:_LONGEST_LINE]) for line in lines), None)


def _pins(failure: RankFailure) -> bool:
    last_frame = failure.traceback.rpartition('  File "')[2]
    return failure.type != _OF_THE_ALLOCATOR and bool(
        _SAYS_IT_PINS.search(failure.message) or _PINS_HERE.search(last_frame)
    )


def _lack_in_text(text: str, device: str) -> MemoryLack | None:
    of_host, of_device = (pattern.search(text) for pattern in _OUT_OF_MEMORY[device])
    if of_host is not None:
        whose = MemoryOwner.HOST if _has_its_own(device) else MemoryOwner.DEVICE
        return MemoryLack(whose, _line_with(text, of_host.start()))
    return None if of_device is None else MemoryLack(MemoryOwner.DEVICE, _line_with(text, of_device.start()))


def _line_with(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : end if end >= 0 else None].strip()[:_LONGEST_LINE]


# Classifies the end of a trial from the records and logs of its ranks.

REFUSED = "deepspeed.initialize has failed:"
"""The beginning of the reason if `deepspeed.initialize` has raised an exception."""

# The process of a rank shows that it got such a signal, and not who has sent it.
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
_OF_NATIVE_CODE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_SENDER_UNKNOWN = "another process has sent it, or the program itself"

# Gloo ends the process with a C++ exception, which Python code does not see.
_CPP_EXCEPTION = re.compile(r"^\s*what\(\):\s*(\S.*)$", re.MULTILINE)
_OTHER_COLLECTIVE = re.compile(r"op\.preamble\.length|collective mismatch")

# The longest text for a table.
_LONGEST_MESSAGE = 300
# Python's words between an exception and the one that it was raised from
_CAUSES = "\n\nThe above exception was the direct cause of the following exception:"
# torch's message of a failed build begins with commands. The cause is the first line in which a compiler complains.
_UNBUILT = re.compile(r"Error building extension '\w+'")
_COMPLAINT = re.compile(r"^.*(?:\berror: |\bfatal\b|: cannot find ).*$", re.MULTILINE)
# DeepSpeed's assertion about a batch (`runtime/config.py`), where it counts a single rank; and the file of `zero.Init`.
_FOR_ONE_RANK, _OF_INIT = re.compile(r"!= \d+ \* \d+ \* 1$"), "partition_parameters.py"
# Exceptions that say nothing of a configuration, by name. The last four are of `torch.distributed`.
_OF_NO_CONFIGURATION = {
    *("ImportError", "ModuleNotFoundError"),
    *("DistError", "DistBackendError", "DistNetworkError", "DistStoreError"),
}


@dataclass(frozen=True)
class RankRecord:
    measurement: Measurement | None  # its measurement. None if it has none.
    failure: RankFailure | None  # the exception that ended it. None if there is no record.
    log_tail: str  # the last lines of its log
    log: str  # path of its log
    engine_built: bool = True  # whether its program has built a DeepSpeed engine


@dataclass(frozen=True)
class TrialEnd:
    outcome: Outcome  # the kind of end
    reason: str = ""  # one sentence that the user can act on. Empty for a completed trial.
    failed_rank: int | None = None  # the rank that failed first, whose log the reason names. None if no rank failed.


def classify(
    ending: ProcessesEnd, ranks: list[RankRecord], deadline_s: float, kernel_killed: bool | None, device: str
) -> TrialEnd:
    """Returns how a trial ended.

    The ranks' measurements come first, then the root cause in any rank's record or log, then the kernel's counter of
    out-of-memory kills (None if the kernel does not show it). Without any of these the trial has crashed. An exit
    status alone is never success.
    """
    measured = [(number, rank.measurement) for number, rank in enumerate(ranks) if rank.measurement is not None]
    for number, measurement in measured:
        if measurement.outcome != Outcome.COMPLETED:
            return TrialEnd(Outcome(measurement.outcome), measurement.reason, number)
    if len(measured) == len(ranks):
        return TrialEnd(Outcome.COMPLETED)
    if ending.ended_by == CANCEL:
        return TrialEnd(Outcome.CANCELLED, "Cancelled while it ran.")
    for number, rank in enumerate(ranks):
        lack = lack_of_memory(rank.failure, rank.log_tail, device)
        if lack is not None:
            if lack.whose is MemoryOwner.DEVICE:
                return _failed_on(ranks, number, Outcome.OUT_OF_MEMORY, lack.said)
            # The line may name CUDA, which locks the pages.
            sentence = f"The host's memory has run out: {lack.said}"
            return _failed_on(ranks, number, Outcome.OUT_OF_HOST_MEMORY, sentence)
    killed = next((number for number, status in enumerate(ending.statuses) if status == -signal.SIGKILL), None)
    if kernel_killed and killed is not None and _sent_by_itself(ranks[killed]) is None:
        of_the_slot = kind_of(device).computes_on_the_processor
        outcome = Outcome.OUT_OF_MEMORY if of_the_slot else Outcome.OUT_OF_HOST_MEMORY
        sentence = f"Rank {killed} was killed by SIGKILL while the kernel killed processes for lack of host memory."
        return _failed_on(ranks, killed, outcome, sentence)
    return _failed(ending, ranks, deadline_s, kernel_killed)


def _failed_on(ranks: list[RankRecord], number: int, outcome: Outcome, sentence: str) -> TrialEnd:
    return TrialEnd(outcome, f"{as_sentence(sentence)} Log: {ranks[number].log}", number)


def is_from_outside(ending: ProcessesEnd, outcome: Outcome, ranks: list[RankRecord]) -> bool:
    """Whether the ranks, their guard or their host were killed from outside. A kill for lack of memory is none."""
    if outcome is not Outcome.CRASHED:
        return False
    killed = any(status in _KILLED for status in ending.statuses) and not _roots(ranks)
    return killed or ending.ended_by in (GUARD, HOST, STOPPED)


def _failed(ending: ProcessesEnd, ranks: list[RankRecord], deadline_s: float, kernel_killed: bool | None) -> TrialEnd:
    if ending.ended_by == HOST:
        gone = f"The host {ending.host} could not be reached or died"
        lost = ranks[ending.host_rank]
        if not lost.log_tail.strip():
            return _failed_on(ranks, 0, Outcome.CRASHED, f"{gone}.")
        return _failed_on(ranks, ending.host_rank, Outcome.CRASHED, f"{gone}: {_last_line(lost)}")
    if ending.ended_by in (STOPPED, REPLACED):
        return _failed_on(ranks, ending.rank, Outcome.CRASHED, _lost(ending))
    if roots := _roots(ranks):
        _, root = min(roots)
        return _failed_on(ranks, root, *_by_exception(ranks[root], len(ranks)))
    if ending.ended_by == DEADLINE:
        waiting = next((number for number, rank in enumerate(ranks) if not rank.engine_built), None)
        if waiting is not None:
            reason = (
                f"The program had no DeepSpeed engine after {deadline_s:.0f} s: it does not call deepspeed.initialize, "
                "or waits for something before that (a download, a prompt, a lock, other processes). "
                f"Its last words: {_last_line(ranks[waiting])}"
            )
            return _failed_on(ranks, waiting, Outcome.TIMED_OUT, reason)
        return _failed_on(ranks, 0, Outcome.TIMED_OUT, f"Still running after its deadline of {deadline_s:.0f} s.")
    if ending.ended_by == GUARD:
        killed_guard = "The trial's guard process, the parent of its ranks, was killed"
        return _failed_on(ranks, 0, Outcome.CRASHED, f"{killed_guard}: {_SENDER_UNKNOWN}.")
    signalled = [number for number, status in enumerate(ending.statuses) if status is not None and status < 0]
    if signalled:
        # A rank that lost its connection to another one may abort.
        root = next((number for number in signalled if not _lost_its_peer(ranks[number])), signalled[0])
        sentence = _by_signal(root, -(ending.statuses[root] or 0), ranks[root], kernel_killed)
        return _failed_on(ranks, root, Outcome.CRASHED, sentence)
    silent = next((number for number, rank in enumerate(ranks) if rank.measurement is None), 0)
    failed = [number for number, status in enumerate(ending.statuses) if status]
    # A rank with an exception has lost its peers.
    culprit = next((number for number in failed if ranks[number].failure is None), (failed or [silent])[0])
    status = ending.statuses[culprit] if culprit < len(ending.statuses) else None
    code = "" if status is None else f" ended with exit code {status} and"
    sentence = f"Rank {culprit}{code} left no result; its last words: {_last_line(ranks[culprit])}"
    return _failed_on(ranks, culprit, Outcome.CRASHED, sentence)


def _roots(ranks: list[RankRecord]) -> list[tuple[float, int]]:
    return [
        (rank.failure.time, number)
        for number, rank in enumerate(ranks)
        if rank.failure and not PEER_DIED.search(rank.failure.message) and rank.failure.message != ANOTHER_HAS_FAILED
    ]


def _lost(ending: ProcessesEnd) -> str:
    if ending.ended_by == STOPPED:
        return f"Rank {ending.rank} was stopped by {ending.seen} and did not go on: {_SENDER_UNKNOWN}."
    return (
        f"Rank {ending.rank} no longer runs the program, because its process executes another one: "
        f"{ending.seen[:_LONGEST_MESSAGE]}. ZeroTune measures in the process that it starts. "
        "Let the program train there."
    )


def _lost_its_peer(rank: RankRecord) -> bool:
    thrown = _CPP_EXCEPTION.search(rank.log_tail)
    return thrown is not None and PEER_DIED.search(thrown[1]) is not None


def _by_exception(rank: RankRecord, ranks: int) -> tuple[Outcome, str]:
    assert rank.failure is not None
    failure = rank.failure
    # The first lines as one. pydantic names the wrong key only in the second and third.
    message = " ".join(" ".join(failure.message.strip().splitlines()[:3]).split())[:_LONGEST_MESSAGE]
    unbuilt, complaint = _UNBUILT.match(failure.message), _COMPLAINT.search(failure.message)
    if unbuilt and complaint:
        message = f"{unbuilt[0]}: {complaint[0].strip()}"[:_LONGEST_MESSAGE]
    if failure.ended_early:
        return Outcome.CRASHED, message
    if failure.elsewhere:
        return Outcome.INVALID, failure.message
    if failure.waits:
        return Outcome.TIMED_OUT, failure.message
    if failure.type == "SystemExit" and message.isdigit():
        said = f"SystemExit: {message}; its last words: {_last_line(rank)}"
        return Outcome.CRASHED, f"The program ended by itself with {said}"
    sentence = f"{failure.type}: {message}" if message else failure.type
    if ranks > 1 and _OF_INIT in failure.traceback and _FOR_ONE_RANK.search(message):
        sentence = f"deepspeed.zero.Init came before deepspeed.init_distributed and counted a single rank: {sentence}"
        return Outcome.CRASHED, f"In the program {sentence}"
    if failure.in_initialize and failure.type not in _OF_NO_CONFIGURATION:
        return Outcome.INVALID, f"{REFUSED} {failure.refusal or sentence}"
    # A library may name only what it could not do then, and not why.
    why, causes, _ = failure.traceback.partition(_CAUSES)
    after_frames = why.rpartition('\n  File "')[2].splitlines()[1:]
    cause = next((line for line in after_frames if line and not line[0].isspace()), "")
    because = f", because of {cause[:_LONGEST_MESSAGE]}" if causes and cause else ""
    return Outcome.CRASHED, f"The program raised {sentence.rstrip('.') if because else sentence}{because}"


def _sent_by_itself(rank: RankRecord) -> str | None:
    # The signal that a rank's program has sent to end the rank, with more words; None if it has sent none.
    last = _last_line(rank)
    return last.removeprefix(SENDS) if last.startswith(SENDS) else None


def _by_signal(number: int, by: int, rank: RankRecord, kernel_killed: bool | None) -> str:
    own = _sent_by_itself(rank)
    if own is not None:
        return f"Rank {number} was ended by its program, which sent {own}."
    name = signal.Signals(by).name if by in set(signal.Signals) else f"signal {by}"
    thrown = _CPP_EXCEPTION.search(rank.log_tail) if by == signal.SIGABRT else None
    if thrown is None:
        if by == signal.SIGKILL:
            shown = "does not show whether it has" if kernel_killed is None else "has counted no such kill meanwhile"
            return (
                f"Rank {number} was killed by SIGKILL. The kernel sends it if memory runs out, and {shown}. "
                f"Otherwise {_SENDER_UNKNOWN}."
            )
        if by in _OF_NATIVE_CODE:
            return f"Rank {number} crashed in native code by {name}; its last words: {_last_line(rank)}"
        return f"Rank {number} was ended by {name}: {_SENDER_UNKNOWN}."
    if _OTHER_COLLECTIVE.search(thrown[1]):
        return (
            f"Rank {number} was in another collective than its peers, and aborted: likely the ranks have different "
            "numbers of batches. Give every rank as many: shards that divide by the ranks, or what is over left out."
        )
    return f"Rank {number} aborted: {thrown[1][:_LONGEST_MESSAGE]}"


def _last_line(rank: RankRecord) -> str:
    return (rank.log_tail.strip().splitlines() or ["it printed nothing."])[-1][:_LONGEST_MESSAGE]


# Reads the records and the log of a rank.

_TAIL_BYTES = 20_000


def read_rank_record(
    record: Path, failure: Path, log: Path, log_start: int = 0, engine_built: Path | None = None
) -> RankRecord:
    """Returns the records of a rank. A record that is missing or damaged is None.

    Bytes of the log before `log_start` are older than the rank. `engine_built` exists when the rank has an engine.
    """
    has_engine = engine_built is None or engine_built.exists()
    measured, ended = read_record(record, MEASUREMENT), read_record(failure, FAILURE)
    return RankRecord(measured, ended, _tail(log, log_start), str(log), has_engine)


_RecordT = TypeVar("_RecordT")
MEASUREMENT, FAILURE, PROGRAM = TypeAdapter(Measurement), TypeAdapter(RankFailure), TypeAdapter(ProgramProfile)


def read_record(path: Path, kind: TypeAdapter[_RecordT]) -> _RecordT | None:
    """Returns the content of a file that a rank writes as JSON. None if it is missing or damaged."""
    # Python's own reader takes a name of a file that is no UTF-8, as a rank has written it.
    with contextlib.suppress(OSError, ValueError):
        return kind.validate_python(json.loads(path.read_bytes()))
    return None


def _tail(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""
