"""One trial as one Prefect task run, named for its candidate."""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectConcurrentFuture
from prefect.states import Completed, State

from trial_lib.experiment.result import Outcome
from trial_lib.launch.trial import TrialPlan
from trial_lib.study.driver import StudyDriver


@task(name="trial", cache_policy=NO_CACHE, persist_result=False)
def trial(driver: StudyDriver, number: int, label: str, plan: Any) -> State:
    """Runs one trial; however it ends, the task run is completed, and its state is named for the outcome."""
    result = driver.run(plan())
    metric = driver.arguments.metric
    if result.outcome is Outcome.COMPLETED:
        message = f"{metric} {result.metrics.get(metric, float('nan')):.4g}"
        get_run_logger().info("%s: %s", label, message)
        return Completed(message=message)
    get_run_logger().warning("%s: %s: %s", label, result.outcome.value, result.reason)
    return Completed(name=result.outcome.value.replace("_", " ").capitalize(), message=result.reason)


TrialFuture = PrefectConcurrentFuture[Any]
"""A trial's task run."""


def submit(driver: StudyDriver, plan: TrialPlan) -> TrialFuture:
    """Starts a trial beside the flow; its result arrives at `driver.next_result`."""
    label = plan.purpose.label(plan.candidate)
    named = trial.with_options(task_run_name=f"trial-{plan.number:04d}-{label}")
    # The plan travels as a function: Prefect would take it apart in search of futures.
    return named.submit(driver, plan.number, label, lambda: plan)
