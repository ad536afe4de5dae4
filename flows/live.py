"""The live view of a study: it reads the study's folder, and nothing else, so it can follow any study."""

import sys
import threading
import time
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trial_lib.experiment.candidate import Candidate, Purpose
from trial_lib.experiment.metrics import SEARCH_METRICS
from trial_lib.experiment.result import Outcome, TrialResult
from trial_lib.experiment.study import StudyPaths
from trial_lib.report.leaderboard import Row, leaderboard
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.history import Asked, AskedSweep, HistoryReader, Told, Withdrawn

_REFRESH_S = 0.5
_ROWS = 8
# The metric and the column that show the same.
_TWICE = ("throughput", "samples/s")


class LiveView:
    """Shows a running study on standard error: a table in a terminal, a line for each trial elsewhere.

    Args:
        paths: the study to follow.
        arguments: of the study.
    """

    def __init__(self, paths: StudyPaths, arguments: StudyArguments) -> None:
        self._history = HistoryReader(paths.history)
        self._arguments = arguments
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._message = "starting"
        self._candidates: dict[int, Candidate] = {}
        self._purposes: dict[int, Purpose] = {}
        self._results: dict[int, TrialResult] = {}
        self._ended = 0  # trials of the budget
        self._ended_before = 0
        self._rows: list[Row] = []  # of the trials that have ended, best first
        self._to_print: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="live-view")

    def note(self, message: str) -> None:
        """Shows what the study is busy with. Callable from any thread."""
        self._message = message
        if not self._console.is_terminal:
            print(message, file=sys.stderr, flush=True)

    def __enter__(self) -> "LiveView":
        """Starts following."""
        self._read()
        self._ended_before = self._ended
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Shows the last state and stops."""
        self._done.set()
        self._thread.join()

    def _follow(self) -> None:
        if not self._console.is_terminal:
            while not self._done.wait(_REFRESH_S):
                self._read()
                self._print_new()
            self._read()
            self._print_new()
            return
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            while not self._done.wait(_REFRESH_S):
                self._read()
                live.update(self._picture())
            self._read()
            live.update(self._picture())

    def _read(self) -> None:
        events = self._history.read()
        for event in events:
            if isinstance(event, Asked):
                self._candidates[event.number] = event.candidate
                self._purposes[event.number] = event.purpose
            elif isinstance(event, AskedSweep):
                for number, candidate in event.numbered:
                    self._candidates[number] = candidate
                    self._purposes[number] = Purpose.SEARCH
            elif isinstance(event, Withdrawn):
                self._candidates.pop(event.number, None)
            elif isinstance(event, Told):
                self._results[event.number] = event.result
                self._to_print.append(event.number)
                self._ended += self._purposes[event.number] in (Purpose.PROFILE, Purpose.SEARCH)
        if events:
            self._rows = leaderboard(self._results, self._candidates, self._arguments.metric)

    def _print_new(self) -> None:
        metric = self._arguments.metric
        for number in self._to_print:
            result = self._results[number]
            value = result.metrics.get(metric)
            said = f"{metric} {value:.4g}" if value is not None else result.reason
            print(
                f"trial {number:04d} {self._name(number)}: {result.outcome.value} {said}", file=sys.stderr, flush=True
            )
        self._to_print.clear()

    def _name(self, number: int) -> str:
        return self._purposes[number].label(self._candidates[number])

    def _picture(self) -> Group:
        rows = self._rows
        running = [number for number in self._candidates if number not in self._results]
        parts: list[Text | Table] = [Text(self._headline(), style="bold")]
        if rows:
            parts.append(self._table(rows))
        if running:
            parts.append(Text("running: " + ", ".join(f"{number:04d} {self._name(number)}" for number in running)))
        parts.append(Text(self._message, style="dim"))
        return Group(*parts)

    def _headline(self) -> str:
        elapsed = time.monotonic() - self._started
        ended = self._ended
        words = [f"{self._arguments.method}: {ended} of at most {self._arguments.max_trials} trials"]
        failed = sum(result.outcome is not Outcome.COMPLETED for result in self._results.values())
        if failed:
            words.append(f"{failed} failed")
        words.append(f"{_clock(elapsed)} so far")
        of_this_run = ended - self._ended_before
        if of_this_run > 2:
            per_trial = elapsed / of_this_run
            words.append(f"{_clock(per_trial * (self._arguments.max_trials - ended))} left at most")
        return ", ".join(words)

    def _table(self, rows: list[Row]) -> Table:
        metric = SEARCH_METRICS[self._arguments.metric]
        table = Table(box=None, pad_edge=False)
        numbers = [name for name in (metric.name, "samples/s", "peak MiB") if (metric.name, name) != _TWICE]
        columns = ["trial", "candidate", *numbers, "measured", "outcome"]
        for column in ("", *columns):
            title = f"{metric.name} ({metric.unit})" if column == metric.name else column
            table.add_column(title, justify="right" if column in ("trial", *numbers) else "left")
        for place, row in enumerate(rows[:_ROWS]):
            shown = row.for_people()
            mark = "best" if place == 0 and row.value is not None else ""
            table.add_row(mark, *(shown[column] for column in columns))
        if len(rows) > _ROWS:
            table.caption = f"and {len(rows) - _ROWS} more"
        return table


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
