"""The history of a study: one line for each ask, tell and stop, in order. Resuming is replaying it."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.experiment.candidate import Candidate, Purpose
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.result import TrialResult


@dataclass(frozen=True)
class Asked:
    """A trial was decided on."""

    number: int
    purpose: Purpose
    candidate: Candidate


@dataclass(frozen=True)
class Told:
    """A trial has ended."""

    number: int
    result: TrialResult


@dataclass(frozen=True)
class Stopped:
    """The search has ended, and why."""

    reason: str


Event = Asked | Told | Stopped


class History:
    """Appends events to the file, each flushed to the disk before the study acts on it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        events, length = _read(path)
        if path.exists() and path.stat().st_size > length:
            # A torn last line, of a write that the machine's end cut short.
            os.truncate(path, length)
        self.replayed = events

    def append(self, event: Event) -> None:
        """Adds one event.

        Raises:
            OSError: the disk is full; nothing was added.
        """
        if isinstance(event, Asked):
            line: dict[str, Any] = {
                "ask": event.number,
                "purpose": event.purpose.value,
                "candidate": event.candidate.model_dump(mode="json"),
            }
        elif isinstance(event, Told):
            line = {"tell": event.number, "result": event.result.model_dump(mode="json")}
        else:
            line = {"stop": event.reason}
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


def read_history(path: Path) -> list[Event]:
    """Returns the events so far; a torn last line is left out."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Event], int]:
    """Returns the whole lines' events, and the bytes that those lines take.

    Raises:
        InputError: a line but for a torn last one is not a record.
    """
    events: list[Event] = []
    length = 0
    if not path.exists():
        return events, length
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            events.append(_event(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                "This line is damaged, and a study is resumed by replaying them all.",
                where=f"{path}, line {number}",
                remedy="Restore the file, or start a new study.",
            ) from error
        length += len(line)
    return events, length


def _event(line: dict[str, Any]) -> Event:
    if "ask" in line:
        return Asked(line["ask"], Purpose(line["purpose"]), Candidate(**line["candidate"]))
    if "tell" in line:
        return Told(line["tell"], TrialResult.model_validate(line["result"]))
    return Stopped(line["stop"])
