"""A command's output: sentences on standard error, JSON on standard output.

Both are for the study's owner, who typed the secrets and owns the folder that has them. So nothing in them is hidden:
a printed path exists, and a printed command runs.
"""

import contextlib
import errno
import io
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zerotune.trial_lib.messages.errors import InputError, plain
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.folders import DOCUMENT_VERSION, StudyPaths
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome
from zerotune.trial_lib.report.study_view import LeaderboardRow, ranked, row_of, trial_columns
from zerotune.trial_lib.study.arguments import StudyArguments, metric_with
from zerotune.trial_lib.study.history import HistoryReader, StudyState, Told, waiting_trials

_WORD_S = 4.0
# A write to a terminal whose window or connection was closed.
_TERMINAL_GONE = (errno.EIO, errno.ENXIO)


def say(text: str = "", to_people: bool = True) -> None:
    click.echo(plain(text), err=to_people)


def say_error(error: Exception | str) -> None:
    """Prints why a command has ended. A message that already begins with the command's name gets no prefix."""
    message = str(error)
    say(message if message.startswith("zerotune ") else f"zerotune: {message}")


@contextlib.contextmanager
def telling_still(what: str, tell: Callable[[str], None] = say, every_s: float = _WORD_S) -> Iterator[None]:
    """Tells every few seconds, in another thread, that the body still works."""
    ended, began = threading.Event(), time.monotonic()

    def work() -> None:
        while not ended.wait(every_s):
            tell(f"still {what} ({time.monotonic() - began:.0f} s)")

    thread = threading.Thread(target=work, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def say_ways(label: str, ways: Sequence[str], width: int = 15) -> None:
    """Prints how a person gets to a page of MLflow's."""
    *commands, place = ways
    for command in commands:
        say(f"{label:<{width}}{command}")
    say_link(f"{'  then open:' if commands else label:<{width}}", place)


def say_link(label: str, address: str) -> None:
    """Prints the address of a page. On a terminal one of `zerotune up`'s servers logs the browser in."""
    # `zerotune --help` needs no server.
    from zerotune.flows.prefect_server import link_for_a_person

    say(f"{label}{link_for_a_person(address)}")


def print_document(document: Mapping[str, Any]) -> None:
    click.echo(json.dumps({"version": DOCUMENT_VERSION, **document}, indent=2))


def open_streams() -> None:
    """Makes sure that standard output and standard error can be written to.

    If one was closed before the command began, the next file that is opened would take its number. If its reader has
    gone, as after `| head -1`, or its terminal, the study must continue.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The kernel takes the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = _stream(1, "strict"), _stream(2, "backslashreplace")


def _stream(number: int, errors: str) -> io.TextIOWrapper:
    before = sys.stdout if number == 1 else sys.stderr
    encoding = "utf-8" if before is None else before.encoding
    file = io.BufferedWriter(_WithoutReader(number, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding, errors if before is None else before.errors, line_buffering=True)


class _WithoutReader(io.FileIO):
    """A stream that discards its output once its reader has gone. So do the processes that this one starts."""

    def write(self, content: Any) -> int | None:
        try:
            return super().write(content)
        except OSError as error:
            is_terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
            if error.errno != errno.EPIPE and not (is_terminal and error.errno in _TERMINAL_GONE):
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(content)


# The live view of a study. It reads nothing but the study's folder, so it can follow any study.

_REFRESH_S = 0.5
_ROWS = 8


class LiveView:
    """Shows a running study on standard error: as a table in a terminal, else as a line for each trial."""

    def __init__(self, paths: StudyPaths, arguments: StudyArguments) -> None:
        self._paths = paths
        self._history = HistoryReader(paths.history)
        self._arguments = arguments
        self._metric = arguments.metric
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._message = "starting"
        self._state = StudyState(keeps_ended=False)
        self._rows: list[LeaderboardRow] = []  # ended trials, best first
        self._failed = 0
        self._ended_before = 0  # trials that count towards --max-trials
        self._to_print: list[LeaderboardRow] = []
        self._done = threading.Event()
        self._saying = threading.RLock()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="live-view")

    def note(self, message: str) -> None:
        """May be called from any thread."""
        self._message = plain(message)
        if not self._console.is_terminal:
            with self._saying:
                # Trials that have ended before come first. A damaged history is reported by the study itself.
                with contextlib.suppress(InputError):
                    self._read()
                self._print_new()
                say(message)

    def __enter__(self) -> "LiveView":
        self._read()
        self._ended_before = self._state.searched
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _follow(self) -> None:
        if not self._console.is_terminal:
            while not self._done.wait(_REFRESH_S):
                self._say_new()
            self._say_new()
            return
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            while not self._done.wait(_REFRESH_S):
                self._read()
                live.update(self._picture())
            self._read()
            live.update(self._picture())

    def _read(self) -> None:
        ended = []
        for event in self._history.read():
            if isinstance(event, Told):
                candidate = self._state.running[event.number]
                # The profile trial shows whether the asked metric is a figure with this model.
                if event.result.purpose is Purpose.PROFILE:
                    self._metric = metric_with(self._metric, event.result)
                ended.append(row_of(event.result, candidate, self._state.names[event.number], self._metric))
            self._state.apply(event)
        if ended:
            self._rows = ranked([*self._rows, *ended])
            self._failed += sum(row.outcome is not Outcome.COMPLETED for row in ended)
            self._to_print += ended

    def _say_new(self) -> None:
        with self._saying:
            self._read()
            self._print_new()

    def _print_new(self) -> None:
        for row in self._to_print:
            said = (
                f"{row.metric} {SEARCH_METRICS[row.metric].shown(row.value)}" if row.value is not None else row.reason
            )
            say(f"trial {row.trial:04d} {row.label}: {row.outcome.value} {said}")
        self._to_print.clear()

    def _picture(self) -> Group:
        rows = self._rows
        waits = waiting_trials(self._paths, self._state.running)
        labels = {number: f"{number:04d} {self._state.label(number)}" for number in self._state.running}
        named = [label for number, label in labels.items() if number not in waits]
        parts: list[Text | Table] = [Text(self._headline(), style="bold")]
        if rows:
            parts.append(self._table(rows))
        if named:
            parts.append(Text("running: " + ", ".join(named)))
        parts += [Text(f"waiting for slots: {labels[number]}: {wait}") for number, wait in waits.items()]
        parts.append(Text(self._message, style="dim"))
        return Group(*parts)

    def _headline(self) -> str:
        elapsed = time.monotonic() - self._started
        ended = self._state.searched
        words = [f"{self._arguments.method}: {ended} of at most {self._arguments.max_trials} trials"]
        if self._failed:
            words.append(f"{self._failed} failed")
        words.append(f"{_clock(elapsed)} so far")
        of_this_run = ended - self._ended_before
        if of_this_run > 2:
            per_trial = elapsed / of_this_run
            words.append(f"{_clock(per_trial * (self._arguments.max_trials - ended))} left at most")
        return ", ".join(words)

    def _table(self, rows: list[LeaderboardRow]) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column(no_wrap=True)
        columns = trial_columns("live", self._metric, rows)
        for column in columns:
            # A name that shows many knobs is cut, so that each trial has one line. `zerotune show` has it whole.
            justify = "right" if column.kind == "number" else "left"
            table.add_column(column.name, justify=justify, overflow="ellipsis", no_wrap=column.kind != "name")
        for place, row in enumerate(rows[:_ROWS]):
            mark = "best" if place == 0 and row.value is not None else ""
            table.add_row(mark, *(column.cell(row) for column in columns))
        if len(rows) > _ROWS:
            table.caption = f"and {len(rows) - _ROWS} more"
        return table


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
