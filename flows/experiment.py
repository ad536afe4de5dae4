"""The full experiment: the user's training at full length, with the winning configuration of a study."""

from prefect import flow

from tasks.experiment import train
from trial_lib.study.driver import StudyDriver


@flow(name="experiment", persist_result=False, validate_parameters=False)
def experiment(driver: StudyDriver) -> bool:
    """Trains with the winner; returns whether the training came to its own end."""
    return train(driver)
