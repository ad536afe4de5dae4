"""Starting a trial or a sweep beside the flow, on this host or on a Ray cluster."""

from concurrent.futures import Future
from typing import Any, Protocol

from tasks.trial import sweep, trial
from trial_lib.study.driver import StudyDriver
from trial_lib.study.runner import Work


class TrialFuture(Protocol):
    """The task run of a trial or of a sweep.

    Attributes:
        wrapped_future: done when it has ended.
        state: what is known of its end.
    """

    wrapped_future: "Future[Any]"
    state: Any

    def wait(self) -> None:
        """Waits for its end."""


def submit(driver: StudyDriver, work: Work) -> TrialFuture:
    """Starts work beside the flow; how it ended arrives at `driver.next_ended`."""
    if driver.arguments.ray_address is not None:
        # Only such a study needs Ray.
        from tasks.ray_trial import submit_to_ray

        return submit_to_ray(driver, work)
    kind = trial if work.sweep is None else sweep
    # The work travels as a function: Prefect would take it apart in search of futures.
    return kind.with_options(task_run_name=work.label).submit(driver, work.label, lambda: work)
