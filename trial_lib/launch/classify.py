"""Classifies the end of a trial from the records and logs of its ranks. Pure functions."""

import re
import signal
from dataclasses import dataclass
from typing import Any

from trial_lib.device.host.this_host import kind_of
from trial_lib.launch.lack_of_memory import PEER_DIED, MemoryLack, MemoryOwner, lack_of_memory
from trial_lib.launch.processes.guard import CANCEL, DEADLINE
from trial_lib.launch.rank_starter import GUARD, HOST, ProcessesEnd
from trial_lib.records.failure_cause import as_sentence
from trial_lib.records.result import Outcome

REFUSED = "DeepSpeed refuses the configuration:"
"""The beginning of the reason if `deepspeed.initialize` has raised an exception."""

# A program does not send itself these signals.
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)

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
    ending: ProcessesEnd, ranks: list[RankRecord], deadline_s: float, kernel_killed: bool, device: str
) -> TrialEnd:
    """Returns how a trial ended.

    The ranks' measurements come first, then the root cause in any rank's record or log, then the kernel's counter of
    out-of-memory kills. Without any of these the trial has crashed. An exit status alone is never success.

    Args:
        ending: the end of the processes.
        ranks: the records of each rank, in rank order.
        deadline_s: the trial's deadline.
        kernel_killed: whether the kernel's out-of-memory killer struck on this host during the trial.
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
    if kernel_killed and any(status == -signal.SIGKILL for status in ending.statuses):
        of_the_slot = kind_of(device).computes_on_the_processor
        outcome = Outcome.OUT_OF_MEMORY if of_the_slot else Outcome.OUT_OF_HOST_MEMORY
        return _failed_on(ranks, 0, outcome, "The kernel killed a rank for lack of host memory.")
    return _failed(ending, ranks, deadline_s)


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
    killed = any(status in _KILLED for status in ending.statuses) and not any(rank.failure for rank in ranks)
    return killed or ending.ended_by in (GUARD, HOST)


def _failed(ending: ProcessesEnd, ranks: list[RankRecord], deadline_s: float) -> TrialEnd:
    if ending.ended_by == HOST:
        gone = f"The host {ending.host} could not be reached or died"
        lost = ranks[ending.host_rank]
        if not lost.log_tail.strip():
            return _failed_on(ranks, 0, Outcome.CRASHED, f"{gone}.")
        return _failed_on(ranks, ending.host_rank, Outcome.CRASHED, f"{gone}: {_last_line(lost)}")
    roots = [
        (rank.failure["time"], number)
        for number, rank in enumerate(ranks)
        if rank.failure and not PEER_DIED.search(rank.failure["message"])
    ]
    if roots:
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
        return _failed_on(ranks, 0, Outcome.CRASHED, "The trial's guard process was killed.")
    killed = next((number for number, status in enumerate(ending.statuses) if status is not None and status < 0), None)
    if killed is not None:
        sentence = _by_signal(killed, -(ending.statuses[killed] or 0), ranks[killed])
        return _failed_on(ranks, killed, Outcome.CRASHED, sentence)
    silent = next((number for number, rank in enumerate(ranks) if rank.measurement is None), 0)
    culprit = next((number for number, status in enumerate(ending.statuses) if status), silent)
    sentence = f"Rank {culprit} left no result; its last words: {_last_line(ranks[culprit])}"
    return _failed_on(ranks, culprit, Outcome.CRASHED, sentence)


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


def _by_signal(number: int, signal_number: int, rank: RankRecord) -> str:
    thrown = _CPP_EXCEPTION.search(rank.log_tail) if signal_number == signal.SIGABRT else None
    if thrown is None:
        return f"Rank {number} was ended by signal {signal_number}."
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
