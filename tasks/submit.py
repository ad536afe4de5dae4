"""Starting a trial or a sweep in the background, on this host or on a Ray cluster."""

from concurrent.futures import Future
from typing import Any, Protocol

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from zerotune.tasks.telling import said, said_of_sizes, told_if_possible
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.history import Withdrawn
from zerotune.trial_lib.study.runner import Work

# The work of one process group as one Prefect task run: a trial, or a sweep of several micro-batch sizes.


@task(name="trial", cache_policy=NO_CACHE, persist_result=False)
def trial(driver: StudyDriver, label: str, work: Any) -> State:
    """Runs one trial. The task run always completes, and its state is named after the trial's outcome."""
    (result,) = driver.run(work())
    assert isinstance(result, TrialResult)
    state = said(result, driver.metric)
    if result.outcome is Outcome.COMPLETED:
        get_run_logger().info("%s: %s", label, state.message)
    else:
        get_run_logger().warning("%s: %s: %s", label, result.outcome.value, result.reason)
    return state


@task(name="sweep", cache_policy=NO_CACHE, persist_result=False)
def sweep(driver: StudyDriver, label: str, work: Any) -> State:
    """Measures several micro-batch sizes in one process group, and lists them in an artifact."""
    swept: Work = work()
    ends = {end.number: end for end in driver.run(swept)}
    metric = driver.metric
    rows = []
    for plan in swept.plans:
        end = ends[plan.number]
        row = {"trial": f"{plan.number:04d}", "micro-batch": plan.candidate.micro_batch_size}
        if isinstance(end, Withdrawn):
            rows.append({**row, "outcome": f"not measured ({end.reason.value})", metric: ""})
        else:
            value = SEARCH_METRICS[metric].shown(end.metrics.get(metric))
            rows.append({**row, "outcome": end.outcome.value, metric: value})
    with told_if_possible(driver.log):
        create_table_artifact(rows, key=f"sweep-{swept.plans[0].number:04d}", description=label)
    state = said_of_sizes(list(ends.values()))
    get_run_logger().info("%s: %s", label, state.message)
    return state


class TrialFuture(Protocol):
    wrapped_future: "Future[Any]"  # done when the task run has ended
    state: Any  # the state that it ended in

    def wait(self) -> None: ...


def submit(driver: StudyDriver, work: Work) -> TrialFuture:
    """Starts work in the background. Its results arrive at `driver.next_ended`."""
    if driver.setup.arguments.ray_address is not None:
        # Other studies do not need Ray.
        from zerotune.tasks.ray_trial import submit_to_ray

        return submit_to_ray(driver, work)
    kind = trial if work.sweep is None else sweep
    # The work is passed as a function, because Prefect would search an object for futures.
    return kind.with_options(task_run_name=work.label).submit(driver, work.label, lambda: work)
