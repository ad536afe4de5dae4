"""What stopping hopeless trials (`trial_lib.measure.too_slow`) would have done to the trials of a table."""

import random
from dataclasses import dataclass

from trial_lib.experiment.result import Outcome
from trial_lib.experiment.table import RecordedTable, TableRow
from trial_lib.experiment.window import StepWindow
from trial_lib.measure.too_slow import ERROR_RATE, is_hopeless, looks_after


@dataclass(frozen=True)
class Stopping:
    """Counts over trials that had something to beat.

    Attributes:
        trials: how many.
        stopped: those that the rule stops.
        wrongly: those of them whose whole measurement beats what was to beat.
        could_win: trials, stopped or not, whose whole measurement does.
        steps: that all trials counted.
        steps_saved: those that the stopped trials would not have made.
    """

    trials: int
    stopped: int
    wrongly: int
    could_win: int
    steps: int
    steps_saved: int
    error_rate: float = ERROR_RATE


def replay_stopping(table: RecordedTable, orders: int) -> Stopping:
    """Returns what the rule does when a table's completed trials run in random order, each against the best before it.

    Times are of the wall clock here, as in a real trial.

    Args:
        table: its rows are the trials.
        orders: random orders to count over.
    """
    rows = [row for repeats in table.rows.values() for row in repeats if row.outcome is Outcome.COMPLETED]
    trials = stopped = wrongly = could_win = steps = saved = 0
    for seed in range(orders):
        random.Random(seed).shuffle(order := list(rows))
        best = order[0].metrics["throughput"]
        for row in order[1:]:
            throughput, made = row.metrics["throughput"], len(row.step_times)
            at = _stopped_after(row, best)
            trials, steps = trials + 1, steps + made
            could_win += throughput > best
            if at is None:
                best = max(best, throughput)
                continue
            stopped, saved = stopped + 1, saved + made - at
            wrongly += throughput > best
    return Stopping(trials, stopped, wrongly, could_win, steps, saved)


def _stopped_after(row: TableRow, to_beat: float) -> int | None:
    """Returns the counted step after which a trial is stopped; None if it never is."""
    samples = row.metrics["throughput"] * row.metrics["latency"]
    window = StepWindow()
    for counted in range(1, len(row.step_times)):
        if looks_after(window, counted) and is_hopeless(row.step_times[:counted], samples, to_beat):
            return counted
    return None
