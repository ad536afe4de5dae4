"""Starting a trial or a sweep in the background, on this host or on a Ray cluster."""

from concurrent.futures import Future
from typing import Any, Protocol

from tasks.trial import sweep, trial
from trial_lib.study.driver import StudyDriver
from trial_lib.study.runner import Work


class TrialFuture(Protocol):
    """The task run of a trial or of a sweep.

    Attributes:
        wrapped_future: done when the task run has ended.
        state: the state that it ended in.
    """

    wrapped_future: "Future[Any]"
    state: Any

    def wait(self) -> None:
        """Waits for its end."""


def submit(driver: StudyDriver, work: Work) -> TrialFuture:
    """Starts work in the background. Its results arrive at `driver.next_ended`."""
    if driver.setup.arguments.ray_address is not None:
        # Other studies do not need Ray.
        from tasks.ray_trial import submit_to_ray

        return submit_to_ray(driver, work)
    kind = trial if work.sweep is None else sweep
    # The work is passed as a function, because Prefect would search an object for futures.
    return kind.with_options(task_run_name=work.label).submit(driver, work.label, lambda: work)
