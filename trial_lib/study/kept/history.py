"""The history of a study: one line for each ask, tell, withdrawal and stop. A resumed study replays it."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from trial_lib.records.result import TrialResult
from trial_lib.study.kept.disk_room import FolderError, check_folder, number_of
from trial_lib.wire.errors import InputError
from trial_lib.wire.json_lines import Line, LineReader, append, drop_torn_tail


@dataclass(frozen=True)
class Asked:
    """The driver has decided on a trial."""

    number: int
    purpose: Purpose
    candidate: Candidate

    @property
    def decided(self) -> "Decided":
        """The same as one decision of the search."""
        return Decided([(self.number, self.candidate)])


@dataclass(frozen=True)
class AskedSweep:
    """The driver has decided on trials of one process group. Their numbers count up from the first."""

    first: int
    sweep: Sweep

    @property
    def numbered(self) -> list[tuple[int, Candidate]]:
        """The candidates with their numbers."""
        return list(enumerate(self.sweep.candidates, self.first))

    @property
    def decided(self) -> "Decided":
        """The same as one decision of the search."""
        return Decided(self.numbered, self.sweep)


@dataclass(frozen=True)
class Decided:
    """One choice of the search.

    Attributes:
        numbered: its candidates, each with the number of its trial.
        sweep: the sweep that they belong to; None for a single candidate.
    """

    numbered: list[tuple[int, Candidate]]
    sweep: Sweep | None = None

    def without(self, numbers: Collection[int]) -> "Decided":
        """Returns the choice without some of its trials."""
        return Decided(
            [(number, candidate) for number, candidate in self.numbered if number not in numbers], self.sweep
        )


@dataclass(frozen=True)
class Withdrawn:
    """A size of a sweep is not measured."""

    number: int
    reason: Withdrawal


@dataclass(frozen=True)
class Told:
    """A trial has ended."""

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
    """The order of a history's lines. A line that is missing or doubled breaks it."""

    def __init__(self) -> None:
        self._asked: set[int] = set()
        self._ended: set[int] = set()

    def take(self, event: Event) -> str | None:
        """Takes the next event. Returns what is wrong with it in a few words, or None."""
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
        """Adds one event.

        Raises:
            OSError: the disk is full. Nothing was added.
            FolderError: as `check` raises it.
        """
        self.check()
        append(self._path, json.dumps(_line(event)), fsync=True)
        self._bytes = self._size()

    def check(self) -> None:
        """Checks that all lines are still there.

        Raises:
            FolderError: they are not, or the study's folder is not.
        """
        check_folder(self._path.parent, self._folder)
        if self._size() < self._bytes:
            raise FolderError(
                f"{self._path} was removed or cut while the study ran, so the study has ended. Put the file back and "
                f"resume with: zerotune resume {self._path.parent}, or start a new study."
            )

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


class HistoryReader:
    """Reads a growing history, each event once. A long history is not read from its start again.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = LineReader(path)
        self._order = _Order()

    @property
    def end(self) -> int:
        """Bytes of the whole lines that have been read."""
        return self._lines.end

    def read(self) -> list[Event]:
        """Returns the events since the last call. A torn last line is left for later.

        Raises:
            InputError: a line is no record, or does not fit the lines before it.
        """
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
        return {"tell": event.number, "result": event.result.model_dump(mode="json")}
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
        return Told(_number(line["tell"]), TrialResult.model_validate(line["result"]))
    return Stopped(str(line["stop"]))


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no trial's number")
    return value
