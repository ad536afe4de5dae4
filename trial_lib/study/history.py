"""The history of a study, its state, which is the history folded line by line, and its unfinished work."""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import Line, LineReader, append, drop_torn_tail
from zerotune.trial_lib.messages.orders import SizeMemory, seconds_since, will_fit
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.units import duration
from zerotune.trial_lib.search.arms import CandidateNames
from zerotune.trial_lib.study.folder import FolderError, check_folder, number_of

# One line for each ask, tell, withdrawal and stop. A resumed study replays them.


@dataclass(frozen=True)
class Asked:
    """The driver has decided on a trial."""

    number: int
    purpose: Purpose
    candidate: Candidate

    @property
    def proposal(self) -> "Proposal":
        return Proposal([(self.number, self.candidate)])


@dataclass(frozen=True)
class AskedSweep:
    """The driver has decided on trials of one process group. Their numbers count up from the first."""

    first: int
    sweep: Sweep

    @property
    def numbered(self) -> list[tuple[int, Candidate]]:
        return list(enumerate(self.sweep.candidates, self.first))

    @property
    def proposal(self) -> "Proposal":
        return Proposal(self.numbered, self.sweep)


@dataclass(frozen=True)
class Proposal:
    numbered: list[tuple[int, Candidate]]  # its candidates, each with the number of its trial
    sweep: Sweep | None = None  # the sweep that they belong to; None for a single candidate

    def without(self, numbers: Collection[int]) -> "Proposal":
        return Proposal(
            [(number, candidate) for number, candidate in self.numbered if number not in numbers], self.sweep
        )


@dataclass(frozen=True)
class Withdrawn:
    """A size of a sweep is not measured."""

    number: int
    reason: Withdrawal


@dataclass(frozen=True)
class Told:
    number: int
    result: TrialResult


@dataclass(frozen=True)
class Stopped:
    """The search has ended, and why."""

    reason: str


Event = Asked | AskedSweep | Withdrawn | Told | Stopped


_REMEDY = "Restore the file, or start a new study."
# The profile trial and the trial of the user's configuration always have these numbers. The search counts on.
PROFILE_NUMBER, SUBMITTED_NUMBER = 0, 1


class _Order:
    """A line that is missing or doubled breaks the order of a history."""

    def __init__(self) -> None:
        self._asked: set[int] = set()
        self._ended: set[int] = set()

    def take(self, event: Event) -> str | None:
        """Returns what is wrong with the next event in a few words, or None."""
        if isinstance(event, Asked):
            return self._ask([event.number], event.purpose)
        if isinstance(event, AskedSweep):
            return self._ask([number for number, _ in event.numbered], Purpose.SEARCH)
        if isinstance(event, Told | Withdrawn):
            return self._end(event)
        return None

    def _ask(self, numbers: list[int], purpose: Purpose) -> str | None:
        for number in numbers:
            expected = max(self._asked | {SUBMITTED_NUMBER}) + 1
            # The candidate of the profile trial is settled when the trial has ended. Until then it may be
            # asked for again.
            is_settled = number != PROFILE_NUMBER or purpose is not Purpose.PROFILE or number in self._ended
            if number in self._asked and is_settled:
                return f"This line asks for trial {number}, but an earlier line has asked for it"
            if number > SUBMITTED_NUMBER and number != expected:
                return f"This line asks for trial {number}, but trial {expected} comes next"
            self._asked.add(number)
        if purpose is Purpose.SEARCH and PROFILE_NUMBER not in self._ended:
            return "This line asks for a trial of the search, but no earlier line has the end of the profile trial"
        return None

    def _end(self, event: "Told | Withdrawn") -> str | None:
        number = event.number
        if number not in self._asked:
            return f"This line has the end of trial {number}, but no earlier line asks for it"
        if number in self._ended:
            return f"This line has the end of trial {number}, but an earlier line has it already"
        if isinstance(event, Told) and event.result.number != number:
            return f"This line has the end of trial {number}, but the result of trial {event.result.number}"
        self._ended.add(number)
        return None


class History:
    """Appends events to the file. Each is on the disk before the study acts on it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.replayed = read_history(path)
        # Of a write that the machine's end cut short.
        drop_torn_tail(path)
        self._bytes, self._folder = self._size(), number_of(path.parent)

    def append(self, event: Event) -> None:
        """Raises OSError if the disk is full, when nothing was added, and what `check` raises."""
        self.check()
        append(self._path, json.dumps(_line(event)), fsync=True)
        self._bytes = self._size()

    def check(self) -> None:
        """Raises FolderError if a line, or the study's folder, is no longer there."""
        check_folder(self._path.parent, self._folder)
        if self._size() < self._bytes:
            raise FolderError(
                f"{self._path} was removed or cut while the study ran, so the study has ended. Put the file back and "
                f"resume with: zerotune resume {self._path.parent}, or start a new study."
            )

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


class HistoryReader:
    """Reads a growing history, each event once. A long history is not read from its start again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = LineReader(path)
        self._order = _Order()

    @property
    def end(self) -> int:
        """Bytes of the whole lines that have been read."""
        return self._lines.end

    def read(self) -> list[Event]:
        """Events since the last call, without a torn last line. Raises InputError for one that does not fit."""
        try:
            return [self._event(line) for line in self._lines.read()]
        except OSError as error:
            raise InputError(
                f"the study's history cannot be read ({error.strerror}).", where=str(self._path), remedy=_REMEDY
            ) from None

    def _event(self, line: Line) -> Event:
        where = f"{self._path}, line {line.number}"
        try:
            event = _event(json.loads(line.content))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            what = "This line is damaged, and resuming a study needs all lines."
            raise InputError(what, where=where, remedy=_REMEDY) from error
        wrong = self._order.take(event)
        if wrong is not None:
            what = f"{wrong}. Resuming a study needs all lines in order."
            raise InputError(what, where=where, remedy=_REMEDY)
        return event


def read_history(path: Path) -> list[Event]:
    """Returns the events so far, without a torn last line."""
    return HistoryReader(path).read()


def _line(event: Event) -> dict[str, Any]:
    if isinstance(event, Asked):
        candidate = event.candidate.model_dump(mode="json")
        return {"ask": event.number, "purpose": event.purpose.value, "candidate": candidate}
    if isinstance(event, AskedSweep):
        sweep = event.sweep
        candidates = [candidate.model_dump(mode="json") for candidate in sweep.candidates]
        estimate = {"bytes_per_sample": sweep.bytes_per_sample, "headroom": sweep.headroom}
        return {"sweep": event.first, "candidates": candidates, **estimate}
    if isinstance(event, Withdrawn):
        return {"withdraw": event.number, "reason": event.reason.value}
    if isinstance(event, Told):
        return {"tell": event.number, "result": event.result.to_json()}
    return {"stop": event.reason}


def _event(line: dict[str, Any]) -> Event:
    if not isinstance(line, dict):
        raise TypeError("no record")
    if "ask" in line:
        return Asked(_number(line["ask"]), Purpose(line["purpose"]), Candidate(**line["candidate"]))
    if "sweep" in line:
        candidates = tuple(Candidate(**candidate) for candidate in line["candidates"])
        sweep = Sweep(candidates, float(line["bytes_per_sample"]), float(line["headroom"]))
        return AskedSweep(_number(line["sweep"]), sweep)
    if "withdraw" in line:
        return Withdrawn(_number(line["withdraw"]), Withdrawal(line["reason"]))
    if "tell" in line:
        return Told(_number(line["tell"]), TrialResult.from_json(line["result"]))
    return Stopped(str(line["stop"]))


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no trial's number")
    return value


# The state of a study: its history, folded line by line.


class StudyState:
    """The trials of a study after the events so far. Only `apply` changes it.

    A reader that shows each end once needs less memory without ended trials in `candidates` and `results`.
    """

    def __init__(self, events: Iterable[Event] = (), keeps_ended: bool = True) -> None:
        self._keeps_ended = keeps_ended
        self._naming = CandidateNames()
        # All by trial number. Trials that were withdrawn have a purpose, and no candidate.
        self.candidates: dict[int, Candidate] = {}
        self.running: dict[int, Candidate] = {}
        self.names: dict[int, str] = {}
        self.purposes: dict[int, Purpose] = {}
        self.results: dict[int, TrialResult] = {}  # in the order of their ends
        self.withdrawn: dict[int, Withdrawal] = {}
        self.searched = 0  # ended trials that count towards `max_trials`: the profile trial and the search's
        self.stopped: str | None = None  # why the search ended; None while it has not
        self.next_number = SUBMITTED_NUMBER + 1
        for event in events:
            self.apply(event)

    def apply(self, event: Event) -> None:
        if isinstance(event, Asked):
            self._ask(event.number, event.purpose, event.candidate)
        elif isinstance(event, AskedSweep):
            for number, candidate in event.numbered:
                self._ask(number, Purpose.SEARCH, candidate)
        elif isinstance(event, Withdrawn):
            del self.running[event.number], self.candidates[event.number], self.names[event.number]
            self.withdrawn[event.number] = event.reason
        elif isinstance(event, Told):
            self._end(event.number, event.result)
        else:
            self.stopped = event.reason

    def _ask(self, number: int, purpose: Purpose, candidate: Candidate) -> None:
        self.candidates[number] = self.running[number] = candidate
        self.names[number] = self._naming.of(candidate, is_own=purpose is Purpose.SUBMITTED)
        self.purposes[number] = purpose
        self.next_number = max(self.next_number, number + 1)

    def _end(self, number: int, result: TrialResult) -> None:
        del self.running[number]
        self.searched += self.purposes[number] in (Purpose.PROFILE, Purpose.SEARCH)
        if self._keeps_ended:
            self.results[number] = result
        else:
            del self.candidates[number], self.names[number]

    def label(self, number: int) -> str:
        """Such as `z2-mbs16` or `confirm-z2-mbs16`."""
        return self.purposes[number].label(self.names[number])

    @property
    def profile(self) -> TrialResult | None:
        return self.results.get(PROFILE_NUMBER)

    @property
    def submitted(self) -> TrialResult | None:
        return self.results.get(SUBMITTED_NUMBER)

    @property
    def has_asked_for_own(self) -> bool:
        """Whether the trial of the user's configuration has begun."""
        return SUBMITTED_NUMBER in self.candidates

    @property
    def profiled(self) -> tuple[TrialResult, Candidate]:
        """The profile trial, which has ended, and its candidate."""
        return self.results[PROFILE_NUMBER], self.candidates[PROFILE_NUMBER]

    @property
    def begun(self) -> list[tuple[Candidate, TrialResult]]:
        """The profile trial and the trial of the user's configuration, as far as they have ended."""
        ended = [number for number in (PROFILE_NUMBER, SUBMITTED_NUMBER) if number in self.results]
        return [(self.candidates[number], self.results[number]) for number in ended]

    @property
    def has_searched(self) -> bool:
        return self.stopped is not None

    def of_purpose(self, purpose: Purpose) -> list[TrialResult]:
        return [result for number, result in self.results.items() if self.purposes[number] is purpose]


# The unfinished work of a study that was cut short.


def stays_open(result: TrialResult) -> bool:
    """Whether a trial must run again: it was cut short, or ran on another kind of device.

    The profile trial and the trial of the user's configuration also run again if they were killed from outside, because
    everything else depends on them.
    """
    is_stood_on = result.purpose in (Purpose.PROFILE, Purpose.SUBMITTED)
    return result.outcome is Outcome.CANCELLED or result.elsewhere or (is_stood_on and result.from_outside)


def unrecorded_ends(paths: StudyPaths, numbers: Iterable[int]) -> Iterator[TrialResult]:
    """Yields the results of trials that had ended when the study died, but whose ends its history lacks."""
    for number in sorted(numbers):
        with contextlib.suppress(OSError, ValueError):
            result = TrialResult.from_text(paths.trial(number).result.read_text())
            if not stays_open(result):
                yield result


def unfinished_work(
    proposals: Sequence[Proposal], results: Mapping[int, TrialResult], withdrawn: Mapping[int, Withdrawal]
) -> tuple[list[Proposal], list[Withdrawn]]:
    """Returns the choices that still have to run, and the sizes of sweeps that are given up.

    A sweep continues only as far as its process group would have: not beyond a size that failed, and not to a size that
    the group would have predicted not to fit.
    """
    left: list[Proposal] = []
    given_up: list[Withdrawn] = []
    for proposal in proposals:
        rest = proposal.without(results.keys() | withdrawn.keys())
        if not rest.numbered:
            continue
        reason = None if proposal.sweep is None else _end_of_group(proposal, proposal.sweep, rest, results, withdrawn)
        if reason is None:
            left.append(rest)
        else:
            given_up += [Withdrawn(number, reason) for number, _ in rest.numbered]
    return left, given_up


def _end_of_group(
    proposal: Proposal,
    sweep: Sweep,
    rest: Proposal,
    results: Mapping[int, TrialResult],
    withdrawn: Mapping[int, Withdrawal],
) -> Withdrawal | None:
    # Why a sweep's process group would have measured no further size; None if it would have.
    next_number, next_candidate = rest.numbered[0]
    # A later size may have ended first, because its result was known already.
    measured = [
        (candidate.micro_batch_size, results[number])
        for number, candidate in proposal.numbered
        if number < next_number and number in results
    ]
    reasons = [withdrawn[number] for number, _ in proposal.numbered if number in withdrawn]
    if reasons:
        return reasons[-1]
    if not measured:
        return None
    if measured[-1][1].outcome not in (Outcome.COMPLETED, Outcome.TOO_SLOW):
        return Withdrawal.ENDED
    if measured[-1][1].memory.was_short:
        return Withdrawal.MEMORY
    sizes = [
        SizeMemory(
            samples=size,
            above_initialize=max(result.memory.above_initialize),
            available=min(result.memory.available, default=None),
        )
        for size, result in measured
        if result.memory.peak
    ]
    if sizes and not will_fit(sizes, next_candidate.micro_batch_size, sweep.bytes_per_sample, sweep.headroom):
        return Withdrawal.MEMORY
    return None


def waiting_trials(paths: StudyPaths, numbers: Iterable[int]) -> dict[int, str]:
    """Those of some trials that wait for slots, each with what it waits for and how long it has waited."""
    found = {}
    for number in numbers:
        # A profile trial begins with the program as typed.
        trial = paths.trial(number)
        for file in (trial.waiting, trial.as_typed.waiting, trial.larger.waiting):
            try:
                wait = json.loads(file.read_text())
                found[number] = f"{wait['waiting']}, after {duration(seconds_since(wait['since']))}"
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return found
