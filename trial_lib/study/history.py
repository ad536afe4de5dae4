"""The history of a study: one line for each ask, tell, withdrawal and stop, in order. Resuming is replaying it."""

import errno
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.experiment.candidate import Candidate, Purpose, Sweep, Withdrawal
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.result import TrialResult


@dataclass(frozen=True)
class Asked:
    """A trial was decided on."""

    number: int
    purpose: Purpose
    candidate: Candidate


@dataclass(frozen=True)
class AskedSweep:
    """Trials were decided on that one process group is to measure; their numbers count up from the first one's."""

    first: int
    sweep: Sweep

    @property
    def numbered(self) -> list[tuple[int, Candidate]]:
        """The candidates with their numbers."""
        return list(enumerate(self.sweep.candidates, self.first))


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


class History:
    """Appends events to the file, each flushed to the disk before the study acts on it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        reader = HistoryReader(path)
        self.replayed = reader.read()
        if path.exists() and path.stat().st_size > reader.end:
            # A torn last line, of a write that the machine's end cut short.
            os.truncate(path, reader.end)

    def append(self, event: Event) -> None:
        """Adds one event.

        Raises:
            OSError: the disk is full; nothing was added.
        """
        line = _line(event)
        with self._path.open("ab", buffering=0) as file:
            length = file.seek(0, os.SEEK_END)
            record = json.dumps(line).encode() + b"\n"
            try:
                if file.write(record) < len(record):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(length)
                raise


class HistoryReader:
    """Reads a history as it grows, each event once: a study of thousands of trials is not read from its start again.

    Args:
        path: the file; it need not exist yet.

    Attributes:
        end: bytes of the whole lines that have been read.
    """

    def __init__(self, path: Path) -> None:
        self.end = 0
        self._path = path
        self._lines = 0

    def read(self) -> list[Event]:
        """Returns the events since the last call; a torn last line is left for later.

        Raises:
            InputError: a line but for a torn last one is not a record.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self.end)
                new = file.read()
        except FileNotFoundError:
            return []
        events: list[Event] = []
        for line in new.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                events.append(_event(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    "This line is damaged, and a study is resumed by replaying them all.",
                    where=f"{self._path}, line {self._lines + 1}",
                    remedy="Restore the file, or start a new study.",
                ) from error
            self._lines += 1
            self.end += len(line)
        return events


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
    if "ask" in line:
        return Asked(line["ask"], Purpose(line["purpose"]), Candidate(**line["candidate"]))
    if "sweep" in line:
        candidates = tuple(Candidate(**candidate) for candidate in line["candidates"])
        return AskedSweep(line["sweep"], Sweep(candidates, line["bytes_per_sample"], line["headroom"]))
    if "withdraw" in line:
        return Withdrawn(line["withdraw"], Withdrawal(line["reason"]))
    if "tell" in line:
        return Told(line["tell"], TrialResult.model_validate(line["result"]))
    return Stopped(line["stop"])
