"""Classifies the end of a trial from the records and logs of its ranks. Pure functions."""

import re
import signal
from dataclasses import dataclass
from typing import Any

from trial_lib.device.host.this_host import kind_of
from trial_lib.launch.lack_of_memory import PEER_DIED, MemoryLack, MemoryOwner, lack_of_memory
from trial_lib.launch.processes.guard import CANCEL, DEADLINE, REPLACED, STOPPED
from trial_lib.launch.rank_starter import GUARD, HOST, ProcessesEnd
from trial_lib.records.failure_cause import as_sentence
from trial_lib.records.result import Outcome
from trial_lib.wire.rank_order import ANOTHER_HAS_FAILED, SENDS

REFUSED = "DeepSpeed refuses the configuration:"
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
# Exceptions that say nothing of a configuration, by name. The last four are of `torch.distributed`.
_OF_NO_CONFIGURATION = {
    *("ImportError", "ModuleNotFoundError"),
    *("DistError", "DistBackendError", "DistNetworkError", "DistStoreError"),
}


@dataclass(frozen=True)
class RankRecord:
    """The records and the log of one rank.

    Attributes:
        measurement: its measurement. None if it has none.
        failure: the exception that ended it, as `measure.rank` records it. None if there is no record.
        log_tail: the last lines of its log.
        log: path of its log.
        engine_built: whether its program has built a DeepSpeed engine.
    """

    measurement: dict[str, Any] | None
    failure: dict[str, Any] | None
    log_tail: str
    log: str
    engine_built: bool = True


@dataclass(frozen=True)
class TrialEnd:
    """How a trial, or an attempt of a training, ended.

    Attributes:
        outcome: the kind of end.
        reason: one sentence that the user can act on. Empty for a completed trial.
        failed_rank: the rank that failed first, whose log the reason names. None if no rank failed.
    """

    outcome: Outcome
    reason: str = ""
    failed_rank: int | None = None


def classify(
    ending: ProcessesEnd, ranks: list[RankRecord], deadline_s: float, kernel_killed: bool | None, device: str
) -> TrialEnd:
    """Returns how a trial ended.

    The ranks' measurements come first, then the root cause in any rank's record or log, then the kernel's counter of
    out-of-memory kills. Without any of these the trial has crashed. An exit status alone is never success.

    Args:
        ending: the end of the processes.
        ranks: the records of each rank, in rank order.
        deadline_s: the trial's deadline.
        kernel_killed: whether the kernel's out-of-memory killer struck on this host during the trial. None if the
            kernel does not show it.
        device: `cuda`, or `cpu`, whose slots use the host's memory.
    """
    measured = [(number, rank.measurement) for number, rank in enumerate(ranks) if rank.measurement is not None]
    for number, measurement in measured:
        if measurement["outcome"] != Outcome.COMPLETED:
            return TrialEnd(Outcome(measurement["outcome"]), measurement["reason"], number)
    if len(measured) == len(ranks):
        return TrialEnd(Outcome.COMPLETED)
    if ending.ended_by == CANCEL:
        return TrialEnd(Outcome.CANCELLED, "Cancelled while it ran.")
    for number, rank in enumerate(ranks):
        lack = lack_of_memory(rank.failure, rank.log_tail, device)
        if lack is not None:
            return _failed_on(ranks, number, *_out_of_memory(lack))
    killed = next((number for number, status in enumerate(ending.statuses) if status == -signal.SIGKILL), None)
    if kernel_killed and killed is not None and _sent_by_itself(ranks[killed]) is None:
        of_the_slot = kind_of(device).computes_on_the_processor
        outcome = Outcome.OUT_OF_MEMORY if of_the_slot else Outcome.OUT_OF_HOST_MEMORY
        sentence = f"Rank {killed} was killed by SIGKILL while the kernel killed processes for lack of host memory."
        return _failed_on(ranks, killed, outcome, sentence)
    return _failed(ending, ranks, deadline_s, kernel_killed)


def _failed_on(ranks: list[RankRecord], number: int, outcome: Outcome, sentence: str) -> TrialEnd:
    return TrialEnd(outcome, f"{as_sentence(sentence)} Log: {ranks[number].log}", number)


def _out_of_memory(lack: MemoryLack) -> tuple[Outcome, str]:
    if lack.whose is MemoryOwner.HOST:
        # The line may name CUDA, which locks the pages.
        return Outcome.OUT_OF_HOST_MEMORY, f"The host's memory has run out: {lack.said}"
    return Outcome.OUT_OF_MEMORY, lack.said


def is_from_outside(ending: ProcessesEnd, outcome: Outcome, ranks: list[RankRecord]) -> bool:
    """Returns whether the ranks, their guard or their host were killed from outside, whatever they ran.

    Args:
        ending: the end of the processes.
        outcome: the outcome by `classify`. A rank that the kernel killed for its memory is out of memory.
        ranks: the records of each rank.
    """
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
        return _failed_on(ranks, root, *_by_exception(ranks[root]))
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
    """Returns the time and the rank of each exception that is not the consequence of another rank's end."""
    return [
        (rank.failure["time"], number)
        for number, rank in enumerate(ranks)
        if rank.failure
        and not PEER_DIED.search(rank.failure["message"])
        and rank.failure["message"] != ANOTHER_HAS_FAILED
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


def _by_exception(rank: RankRecord) -> tuple[Outcome, str]:
    """Returns the outcome of a trial with an exception in a rank, and a sentence about it."""
    assert rank.failure is not None
    failure, message = rank.failure, _first_lines(rank.failure["message"])
    if failure["ended_early"]:
        return Outcome.CRASHED, message
    if failure.get("elsewhere"):
        return Outcome.INVALID, str(failure["message"])
    if failure.get("waits"):
        return Outcome.TIMED_OUT, str(failure["message"])
    if failure["type"] == "SystemExit" and message.isdigit():
        said = f"SystemExit: {message}; its last words: {_last_line(rank)}"
        return Outcome.CRASHED, f"The program ended by itself with {said}"
    sentence = f"{failure['type']}: {message}" if message else str(failure["type"])
    if failure["in_initialize"] and failure["type"] not in _OF_NO_CONFIGURATION:
        return Outcome.INVALID, f"{REFUSED} {failure.get('refusal') or sentence}"
    return Outcome.CRASHED, f"The program raised {sentence}"


def _sent_by_itself(rank: RankRecord) -> str | None:
    """Returns the signal that a rank's program has sent to end the rank, with more words; None if it has sent none."""
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


def _first_lines(message: str) -> str:
    """Returns the first lines of a message as one. pydantic names the wrong key only in the second and third."""
    return " ".join(" ".join(message.strip().splitlines()[:3]).split())[:_LONGEST_MESSAGE]
