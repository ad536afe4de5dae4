"""Stopping hopeless trials (`zerotune.trial_lib.rank.probe`): where it ends one, and what it does to a table's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replay.recorded import RecordedTable
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.rank.probe import ERROR_RATE, is_hopeless, looks_after
from zerotune.trial_lib.records.result import Outcome


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
            at = stopped_after(row.step_times, throughput * row.metrics["latency"], best)
            trials, steps = trials + 1, steps + made
            could_win += throughput > best
            if at is None:
                best = max(best, throughput)
                continue
            stopped, saved = stopped + 1, saved + made - at
            wrongly += throughput > best
    return Stopping(trials, stopped, wrongly, could_win, steps, saved)


def stopped_after(step_times: Sequence[float], samples_per_step: float, to_beat: float) -> int | None:
    """Returns the counted step after which a trial is stopped; None if it never is.

    It is looked at as a trial that has to make all these steps, whatever the first ones show.

    Args:
        step_times: seconds of all its counted steps.
        samples_per_step: over all ranks.
        to_beat: the best's throughput in samples/s over all ranks.
    """
    window = StepWindow(end_step=StepWindow.start_step + len(step_times) - 1)
    for counted in range(1, len(step_times)):
        if looks_after(window, counted) and is_hopeless(step_times[:counted], samples_per_step, to_beat):
            return counted
    return None
