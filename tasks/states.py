"""The final states of task runs. Prefect has no names for the outcomes of a trial."""

from collections.abc import Sequence

from prefect.states import Completed, State

from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS


def said(result: TrialResult, metric: str) -> State:
    """Returns the state of a trial's task run, named after the trial's outcome."""
    if result.outcome is Outcome.COMPLETED:
        return Completed(message=f"{metric} {SEARCH_METRICS[metric].shown(result.metrics.get(metric))}")
    return Completed(name=result.outcome.value.replace("_", " ").capitalize(), message=result.reason)


def said_of_sizes(ends: Sequence[object]) -> State:
    """Returns the state of a sweep's task run."""
    completed = sum(isinstance(end, TrialResult) and end.outcome is Outcome.COMPLETED for end in ends)
    return Completed(message=f"{completed} of {len(ends)} sizes completed")
