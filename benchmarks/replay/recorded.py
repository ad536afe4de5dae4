"""A recorded table: the measurements of every candidate of a grid in one file. Searches are replayed on it.

The file has JSON lines. The first is the `TableHead`. Each other line is one trial (`TableRow`). A repeated candidate
has several.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import LineReader, append
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, FrozenRecord
from zerotune.trial_lib.records.result import Outcome, TrialResult

VERSION = 1
# A table is a file of the user's that colleagues may read. The umask applies.
_MODE = 0o666


class TableHead(FrozenRecord):
    """The description of a table."""

    table: int = VERSION  # the format's version
    name: str  # of the experiment
    entrypoint: list[str]  # its command
    base_config: dict[str, Any]  # the user's DeepSpeed configuration, which candidates are merged into
    slots: int  # devices of a trial
    device: str  # `cuda` or `cpu`
    memory_limit: int | None  # bytes of a slot; None for all of a GPU
    profile: ModelProfile  # the findings of the profile trial
    machine: dict[str, str] = Field(default_factory=dict)  # cores or devices, memory and versions


class TableRow(FrozenRecord):
    """The comparable part of one trial's result. Units as in `TrialResult`."""

    candidate: Candidate  # the candidate that ran
    repeat: int  # how often the same candidate had run before
    outcome: Outcome  # how it ended
    metrics: dict[str, float]  # by name
    step_times: list[float]  # seconds of the counted optimizer steps
    losses: list[float]  # of the first optimizer steps
    memory: Memory  # by rank, in bytes
    phases: dict[str, float]  # seconds of each part

    @classmethod
    def of(cls, candidate: Candidate, repeat: int, result: TrialResult) -> "TableRow":
        shared = {name: getattr(result, name) for name in cls.model_fields if name not in ("candidate", "repeat")}
        return cls(candidate=candidate, repeat=repeat, **shared)


@dataclass
class RecordedTable:
    """A table in memory."""

    head: TableHead  # its description
    rows: dict[str, list[TableRow]] = field(default_factory=dict)  # by `key_of`, in the order of repeats

    def candidates(self) -> Iterator[Candidate]:
        for rows in self.rows.values():
            yield rows[0].candidate


def key_of(candidate: Candidate) -> str:
    """Returns the key of a candidate: equal candidates have the same."""
    return json.dumps([candidate.settings, candidate.slots], sort_keys=True)


def read_table(path: Path) -> RecordedTable:
    """Reads a table, without a torn last line. A missing file, or one that is no table, is an `InputError`."""
    try:
        path.stat()  # a reader would wait for a missing file
        lines = [line.content for line in LineReader(path).read()]
    except OSError as error:
        raise InputError(
            f"it cannot be read ({error.strerror}).",
            where=str(path),
            remedy="Name a file that benchmarks.replay.record wrote.",
        ) from None
    try:
        table = RecordedTable(TableHead.model_validate_json(lines[0] if lines else ""))
        for line in lines[1:]:
            row = TableRow.model_validate_json(line)
            table.rows.setdefault(key_of(row.candidate), []).append(row)
    except ValidationError as error:
        raise InputError(
            f"this is no recorded table, or it is damaged ({error.errors()[0]['msg']}).",
            where=str(path),
            remedy="Record the table again.",
        ) from None
    return table


def append_line(path: Path, line: TableHead | TableRow) -> None:
    """Adds a line to a table's file."""
    append(path, line.model_dump_json(), mode=_MODE)
