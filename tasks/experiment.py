"""Training at full length."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from trial_lib.study.driver import StudyDriver


@task(name="train", cache_policy=NO_CACHE, persist_result=False)
def train(driver: StudyDriver) -> bool:
    """Runs the submitted experiment with the best configuration merged in; returns whether it ended well."""
    get_run_logger().info("logs: %s", driver.paths.full_experiment.root)
    driver.log.info("full experiment: its logs are in %s", driver.paths.full_experiment.root)
    return driver.run_full_experiment()
