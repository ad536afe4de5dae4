"""The known winner that a study starts from, and how the new winner compares with it."""

from uuid import NAMESPACE_URL, uuid5

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from tasks.telling import told_if_possible
from trial_lib.study.confirm.of_study import since_last_study
from trial_lib.study.driver import StudyDriver
from trial_lib.study.earlier.known_winner import starting_from

REGRESSION = "zerotune.regression"
"""The Prefect event for a winner that is slower than the last known one. Automations are triggered by it."""


@task(name="known winner", cache_policy=NO_CACHE, persist_result=False)
def tell_start(driver: StudyDriver) -> None:
    """Writes to the study's log and to Prefect where the study starts, and what has changed since the last one."""
    said = starting_from(driver)
    driver.log.info("%s", said)
    get_run_logger().info(said)


@task(name="since the last study", cache_policy=NO_CACHE, persist_result=False)
def tell_since_last(driver: StudyDriver) -> None:
    """Reports how the winner compares with the last known one. Emits an event if it is slower beyond the noise."""
    compared = since_last_study(driver)
    if compared is None:
        return
    driver.log.info("the winner: %s", compared.sentence)
    if not compared.is_regression:
        get_run_logger().info("the winner: %s", compared.sentence)
        return
    get_run_logger().warning("the winner: %s", compared.sentence)
    name = driver.setup.experiment.name
    with told_if_possible(driver.log):
        emit_event(
            REGRESSION,
            resource={"prefect.resource.id": f"zerotune.experiment.{name}", "prefect.resource.name": name},
            payload={"study_id": driver.setup.study_id, "folder": str(driver.setup.paths.root), **compared.document()},
            # Prefect stores it once, however often a study is resumed. An automation may run again after minutes.
            id=uuid5(NAMESPACE_URL, f"{REGRESSION}/{driver.setup.study_id}"),
        )
