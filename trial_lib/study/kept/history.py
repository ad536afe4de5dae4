"""The history of a study: one line for each ask, tell, withdrawal and stop, in order. Resuming is replaying it."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from trial_lib.records.result import TrialResult
from trial_lib.wire.errors import InputError
from trial_lib.wire.json_lines import Line, LineReader, append, drop_torn_tail


@dataclass(frozen=True)
class Asked:
    """A trial was decided on."""

    number: int
    purpose: Purpose
    candidate: Candidate

    @property
    def decided(self) -> "Decided":
        """The same as one decision of the search."""
        return Decided([(self.number, self.candidate)])


@dataclass(frozen=True)
class AskedSweep:
    """Trials were decided on that one process group is to measure; their numbers count up from the first one's."""

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
    """What a search has asked for at once.

    Attributes:
        numbered: its candidates, each with its trial's number.
        sweep: what asked for them together; None for a single candidate.
    """

    numbered: list[tuple[int, Candidate]]
    sweep: Sweep | None = None

    def without(self, numbers: Collection[int]) -> "Decided":
        """Returns what is left of it when some trials are not to run."""
        return Decided(
            [(number, candidate) for number, candidate in self.numbered if number not in numbers], self.sweep
        )


@dataclass(frozen=True)
class Withdrawn:
    """A size of a sweep is not measured after all."""

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
# The user's configuration has this number, whenever it is measured; what a search decides on counts from the next.
_PROFILE, _SUBMITTED = 0, 1


class _Order:
    """What has to be so of a history's lines together: a line that somebody has lost, or has twice, shows."""

    def __init__(self) -> None:
        self._asked: set[int] = set()
        self._ended: set[int] = set()

    def take(self, event: Event) -> str | None:
        """Takes the next event in; returns in some words what is wrong with it, or None."""
        if isinstance(event, Asked):
            return self._ask([event.number], event.purpose)
        if isinstance(event, AskedSweep):
            return self._ask([number for number, _ in event.numbered], Purpose.SEARCH)
        if isinstance(event, Told | Withdrawn):
            return self._end(event)
        return None

    def _ask(self, numbers: list[int], purpose: Purpose) -> str | None:
        for number in numbers:
            expected = max(self._asked | {_SUBMITTED}) + 1
            # What the profile trial runs with is known for good when it has ended: it may be asked for again till then.
            is_settled = number != _PROFILE or purpose is not Purpose.PROFILE or number in self._ended
            if number in self._asked and is_settled:
                return f"This line asks for trial {number}, as one before it does"
            if number > _SUBMITTED and number != expected:
                return f"This line asks for trial {number}, and trial {expected} was to be next"
            self._asked.add(number)
        if purpose is Purpose.SEARCH and _PROFILE not in self._ended:
            return "This line asks for a trial of the search, and none before it says how the profile trial ended"
        return None

    def _end(self, event: "Told | Withdrawn") -> str | None:
        number = event.number
        if number not in self._asked:
            return f"This line tells how trial {number} ended, and none before it asks for that"
        if number in self._ended:
            return f"This line tells how trial {number} ended, as one before it does"
        if isinstance(event, Told) and event.result.number != number:
            return f"This line tells how trial {number} ended by the result of trial {event.result.number}"
        self._ended.add(number)
        return None


class History:
    """Appends events to the file, each flushed to the disk before the study acts on it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.replayed = read_history(path)
        # Of a write that the machine's end cut short.
        drop_torn_tail(path)

    def append(self, event: Event) -> None:
        """Adds one event.

        Raises:
            OSError: the disk is full; nothing was added.
        """
        append(self._path, json.dumps(_line(event)), fsync=True)


class HistoryReader:
    """Reads a history as it grows, each event once: a study of thousands of trials is not read from its start again.

    Args:
        path: the file; it need not exist yet.
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
        """Returns the events since the last call; a torn last line is left for later.

        Raises:
            InputError: a line but for a torn last one is not a record, or does not fit those before it.
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
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = "This line is damaged, and a study is resumed by replaying them all."
            raise InputError(what, where=where, remedy=_REMEDY) from error
        wrong = self._order.take(event)
        if wrong is not None:
            what = f"{wrong}, and a study is resumed by replaying all lines in order."
            raise InputError(what, where=where, remedy=_REMEDY)
        return event


def read_history(path: Path) -> list[Event]:
    """Returns the events so far; a torn last line is left out."""
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
