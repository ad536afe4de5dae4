"""The work of one process group on a Ray cluster, as one Prefect task run."""

import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.states import Completed, Crashed, State
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options

from zerotune.tasks.telling import keep_secrets_from_prefect, said, said_of_sizes, told_if_possible
from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, keep_secret, known_here
from zerotune.trial_lib.launch.ray_cluster import HostLostError, RayPlace, carry_out, is_loss, options_of
from zerotune.trial_lib.launch.ray_host import ClusterOrder, Delivery
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.runner import Work


@task(cache_policy=NO_CACHE, persist_result=False)
def trial_on_ray(order: Callable[[], ClusterOrder], label: str, metric: str, secrets: KnownSecrets) -> State:
    """Carries out an order on the cluster. The task run always completes, and its state describes the outcome."""
    keep_secret(secrets)
    keep_secrets_from_prefect()
    delivery = carry_out(order())
    results = [end for end in delivery.ends if isinstance(end, TrialResult)]
    if len(delivery.ends) == 1:
        state = said(results[0], metric)
        get_run_logger().info("%s: %s: %s", label, results[0].outcome.value, state.message)
    elif delivery.ends:
        state = said_of_sizes(delivery.ends)
    else:
        state = Completed(message="The ranks have ended on all hosts.")
    state.data = delivery
    return state


@dataclass(frozen=True)
class RayWork:
    wrapped_future: "Future[Any]"  # done when the work has ended

    @property
    def state(self) -> str:
        return repr(self.wrapped_future.exception())

    def wait(self) -> None:
        self.wrapped_future.exception()


def submit_to_ray(driver: StudyDriver, work: Work) -> RayWork:
    """Starts work on the cluster, in the background. Its results arrive at `driver.next_ended`."""
    assert isinstance(driver.place, RayPlace)
    driver.place.send = lambda order: _SentByPrefect(order, driver.metric, driver.log)
    thread = ThreadPoolExecutor(1, thread_name_prefix=work.label)
    # Prefect finds the flow's run in the context.
    future = thread.submit(contextvars.copy_context().run, driver.run, work)
    thread.shutdown(wait=False)
    return RayWork(future)


class _SentByPrefect:
    """An order as a task run of prefect-ray, which requests the trial's slots as resources."""

    def __init__(self, order: ClusterOrder, metric: str, log: logging.Logger) -> None:
        self._log = log
        label = Work(order.plans, order.sweep).label
        name = "trial" if order.sweep is None else "sweep"
        named = trial_on_ray.with_options(name=name, task_run_name=label)
        # The order is passed as a function, because Prefect would search an object for futures.
        parameters = {"order": lambda: order, "label": label, "metric": metric, "secrets": known_here()}
        # It uses the existing connection to Ray.
        with RayTaskRunner() as runner, remote_options(**options_of(order.share)):
            self._future = runner.submit(named, parameters)

    def wait(self, timeout_s: float) -> bool:
        ended, _ = ray.wait([self._future.wrapped_future], timeout=timeout_s)
        return bool(ended)

    def delivery(self) -> Delivery:
        try:
            delivery: Delivery = self._future.result()
        except ray.exceptions.RayError as error:
            if not is_loss(error):
                raise
            reason = " ".join(str(error).split())[:300]
            with told_if_possible(self._log), get_client(sync_client=True) as client:
                client.set_task_run_state(self._future.task_run_id, Crashed(message=reason), force=True)
            raise HostLostError(reason) from error
        return delivery

    def abandon(self) -> None:
        ray.cancel(self._future.wrapped_future)
