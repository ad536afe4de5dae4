"""The driver's own work on a study of many trials: what it costs a trial does not grow with those that have ended."""

import logging
import time
from pathlib import Path
from statistics import median

import pytest

from benchmarks.operations.instant_launcher import InstantLauncher
from trial_lib.experiment.study import StudyPaths
from trial_lib.experiment.yaml_file import read_experiment
from trial_lib.launch.hardware import Host
from trial_lib.launch.place import ThisHost
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.driver import StudyDriver

TRIALS = 120
WINDOW = 30
MODEL = Path(__file__).parents[2] / "programs" / "tiny_study"


@pytest.fixture
def driver(tmp_path: Path) -> StudyDriver:
    arguments = StudyArguments(
        config_path=MODEL / "deepspeed.yaml", model_dir=MODEL, method="random", max_trials=TRIALS, max_micro_batch=300
    )
    experiment = read_experiment(MODEL / "deepspeed.yaml", MODEL)
    paths = StudyPaths(tmp_path / "study")
    paths.trials.mkdir(parents=True)
    host = Host("cpu", ["0"], 10 * 2**30)
    place = ThisHost(InstantLauncher(), host, tmp_path / "locks")
    return StudyDriver("s", 0.0, experiment, arguments, paths, host, place, logging.getLogger("s"))


def test_the_last_of_many_trials_cost_no_more_than_the_first(driver: StudyDriver) -> None:
    from trial_lib.study.runner import Work

    for plan in (driver.profile_plan, driver.submitted_plan):
        found = plan()
        assert found is not None
        (end,) = driver.run(Work((found,)))
        driver.tell(end)
    costs = []
    while True:
        began = time.thread_time()
        work = driver.next_work(1)
        if not work:
            break
        for end in driver.run(work[0]):
            driver.tell(end)
        costs.append(time.thread_time() - began)
    assert driver.searched == TRIALS
    first, last = median(costs[:WINDOW]), median(costs[-WINDOW:])
    assert last < 2 * first + 2e-3
    assert last < 20e-3
