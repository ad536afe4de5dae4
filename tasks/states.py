"""The state that a task run is told to have ended in: a trial's outcome has none of Prefect's names."""

from collections.abc import Sequence

from prefect.states import Completed, State

from trial_lib.experiment.metrics import SEARCH_METRICS
from trial_lib.experiment.result import Outcome, TrialResult


def said(result: TrialResult, metric: str) -> State:
    """Returns the state of a task run that a trial has ended in, named for its outcome."""
    if result.outcome is Outcome.COMPLETED:
        return Completed(message=f"{metric} {SEARCH_METRICS[metric].shown(result.metrics.get(metric))}")
    return Completed(name=result.outcome.value.replace("_", " ").capitalize(), message=result.reason)


def said_of_sizes(ends: Sequence[object]) -> State:
    """Returns the state of a task run that has measured the sizes of a sweep, as far as they fit."""
    completed = sum(isinstance(end, TrialResult) and end.outcome is Outcome.COMPLETED for end in ends)
    return Completed(message=f"{completed} of {len(ends)} sizes completed")
