"""The live view of a study. It reads nothing but the study's folder, so it can follow any study."""

import contextlib
import threading
import time
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zerotune.flows.terminal import say
from zerotune.trial_lib.messages.errors import InputError, plain
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult
from zerotune.trial_lib.report.study_view import LeaderboardRow, ranked, row_of, trial_columns
from zerotune.trial_lib.search.methods import METHODS
from zerotune.trial_lib.study.arguments import StudyArguments, metric_with
from zerotune.trial_lib.study.history import HistoryReader, StudyState, Told, waiting_trials
from zerotune.trial_lib.study.reduction import longest_confirmation_s

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
        self._spent = _Spent()
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
        # The command now says how it has ended.
        self._message = ""
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
                self._spent.take(event.result)
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
        done, of, left = self._share_done()
        # A bar by itself does not end its line.
        bar = Table.grid()
        bar.add_row(ProgressBar(total=of, completed=done, width=min(60, self._console.width)))
        parts: list[Text | Table] = [Text(self._headline(left), style="bold"), bar]
        if rows:
            parts.append(self._table(rows))
        if named:
            parts.append(Text("running: " + ", ".join(named)))
        parts += [Text(f"waiting for slots: {labels[number]}: {wait}") for number, wait in waits.items()]
        if self._message:
            parts.append(Text(self._message, style="dim"))
        return Group(*parts)

    def _share_done(self) -> tuple[float, float, str]:
        # What is done, of how much, and the time that is left in words: of the search, then of the confirmation.
        ended, most = self._state.searched, self._arguments.max_trials
        if self._state.has_searched and METHODS[self._arguments.method].confirms_winner:
            longest = longest_confirmation_s(self._spent.searching_s)
            left = longest - self._spent.confirming_s
            # The least number of rounds is measured whatever it takes.
            said = f"about {_clock(left)} left to confirm" if left > 0 else "the last rounds of confirming"
            return min(self._spent.confirming_s, longest), longest, said
        of_this_run = ended - self._ended_before
        if of_this_run < 3:
            return ended, most, ""
        per_trial = (time.monotonic() - self._started) / of_this_run
        return ended, most, f"{_clock(per_trial * (most - ended))} left at most"

    def _headline(self, left: str) -> str:
        ended, most = self._state.searched, self._arguments.max_trials
        failed = f"{self._failed} failed" if self._failed else ""
        so_far = f"{_clock(time.monotonic() - self._started)} so far"
        return ", ".join(filter(None, [f"{ended} of at most {most} trials", failed, so_far, left]))

    def _table(self, rows: list[LeaderboardRow]) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column(no_wrap=True)
        columns = trial_columns("live", self._metric, rows)
        for column in columns:
            # A name that shows many knobs is cut, so that each trial has one line. `zerotune show` has it whole.
            justify = "right" if column.kind == "number" else "left"
            table.add_column(column.name, justify=justify, overflow="ellipsis", no_wrap=column.kind != "name")
        for place, row in enumerate(rows[:_ROWS]):
            is_best = place == 0 and row.value is not None
            style = "green" if is_best else "red" if row.outcome is not Outcome.COMPLETED else ""
            # A cell is no markup, whatever a program's settings are called.
            ended = row.outcome.value.replace("_", " ")
            cells = (Text(column.cell(row) or (ended if column.name == self._metric else "")) for column in columns)
            table.add_row("best" if is_best else "", *cells, style=style)
        if len(rows) > _ROWS:
            table.caption = f"and {len(rows) - _ROWS} more"
        return table


class _Spent:
    """Seconds that trials took: those of the search with what was before it, and the confirming ones."""

    def __init__(self) -> None:
        self.searching_s = self.confirming_s = self._counted_to = 0.0

    def take(self, result: TrialResult) -> None:
        # Time in which several ran counts once.
        end = result.started_at + sum(result.phases.values())
        seconds = max(0.0, end - max(result.started_at, self._counted_to))
        self._counted_to = max(self._counted_to, end)
        if result.purpose is Purpose.CONFIRM:
            self.confirming_s += seconds
        else:
            self.searching_s += seconds


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
