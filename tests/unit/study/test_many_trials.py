"""The driver's own work on a study of many trials: neither its time nor its memory grows faster than they do."""

import contextlib
import gc
import json
import logging
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from benchmarks.operations.instant_starter import InstantStarter
from zerotune.flows.live_view import LiveView
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.launch.trial import ThisHost
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.runner import Work
from zerotune.trial_lib.study.setup import StudySetup

TRIALS = 120
WINDOW = 30
WRITES = 24  # of a whole file, in the driver's own time for a trial
DRIVER_KIB, TABLE_KIB = 16.0, 4.0  # of a trial
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
    place = ThisHost(InstantStarter(), host, tmp_path / "locks")
    return StudyDriver(StudySetup.now("s", 0.0, experiment, arguments, paths, host), place, logging.getLogger("s"))


def begin(driver: StudyDriver) -> None:
    """Runs the profile trial, and that of the user's configuration."""
    for plan in (driver.profile_plan, driver.submitted_plan):
        found = plan()
        assert found is not None
        (end,) = driver.run(Work((found,)))
        driver.tell(end)


def run_next(driver: StudyDriver) -> bool:
    """Runs what the search asks for next; returns whether there was anything."""
    work = driver.next_work(1)
    if not work:
        return False
    for end in driver.run(work[0]):
        driver.tell(end)
    return True


def test_the_last_of_many_trials_cost_no_more_than_the_first(driver: StudyDriver, tmp_path: Path) -> None:
    begin(driver)
    costs, writes = [], []
    began = time.thread_time()
    while run_next(driver):
        ended = time.thread_time()
        write_whole(tmp_path / "one.json", json.dumps(dict.fromkeys(map(str, range(100)), 0.5)))
        costs.append(ended - began)
        began = time.thread_time()
        writes.append(began - ended)
    assert driver.state.searched == TRIALS
    first, last = median(costs[:WINDOW]), median(costs[-WINDOW:])
    assert last < 2 * first + 2e-3
    # A slow machine is measured by its own time for a small file.
    assert last < max(20e-3, WRITES * median(writes[-WINDOW:]))


@pytest.mark.long
def test_a_trial_that_has_ended_takes_a_bounded_part_of_the_driver_s_memory_and_of_the_live_table_s(
    driver: StudyDriver,
) -> None:
    begin(driver)
    for _ in range(WINDOW):
        run_next(driver)
    with memory_growth() as grown:
        while run_next(driver):
            pass
    trials = TRIALS - WINDOW
    assert driver.state.searched == TRIALS
    assert sum(grown) / trials < DRIVER_KIB

    view = LiveView(driver.setup.paths, driver.setup.arguments)
    with memory_growth() as grown:
        view._read()
    assert len(view._rows) > trials
    assert sum(grown) / TRIALS < TABLE_KIB


@contextlib.contextmanager
def memory_growth() -> Iterator[list[float]]:
    """Yields a list that has, after its body, by how many KiB this process's Python objects have grown."""
    grown: list[float] = []
    gc.collect()
    tracemalloc.start()
    try:
        yield grown
        gc.collect()
        grown.append(tracemalloc.get_traced_memory()[0] / 1024)
    finally:
        tracemalloc.stop()
