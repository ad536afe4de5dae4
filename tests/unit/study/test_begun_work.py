"""Work that begins before its task run exists: it runs once, and its end and its failure arrive as any other's."""

import logging
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.operations.instant_starter import InstantStarter
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.folder import FolderError
from zerotune.trial_lib.study.history import HistoryReader, Told
from zerotune.trial_lib.study.runner import Runner, Work
from zerotune.trial_lib.study.setup import StudySetup

MODEL = Path(__file__).parents[2] / "programs" / "tiny_study"


class SlowPlace:
    """A place whose trials last until `go` is set."""

    def __init__(self) -> None:
        self.go, self.runs = threading.Event(), 0
        self.error: Exception | None = None

    def run_trial(self, plan: Any, cancelled: threading.Event, note: Any) -> TrialResult:
        self.runs += 1
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return result_of(plan)


def result_of(plan: Any) -> TrialResult:
    of_plan = {name: getattr(plan, name) for name in ("trial_id", "number", "purpose", "name", "config_hash")}
    return TrialResult(**of_plan, outcome=Outcome.COMPLETED)


class Plan:
    """The fields of a plan that a runner reads."""

    trial_id, number, purpose, name, config_hash, label = "t0", 0, Purpose.PROFILE, "", "", "profile"
    candidate = Candidate(micro_batch_size=1)

    def __init__(self, root: Path) -> None:
        self.paths = StudyPaths(root).trial(0)
        self.paths.root.mkdir(parents=True)


@pytest.fixture
def place() -> SlowPlace:
    return SlowPlace()


@pytest.fixture
def runner(place: SlowPlace) -> Runner:
    return Runner(
        cast(Any, place),
        logging.getLogger("test"),
        lambda plan: None,
        lambda plan: None,
        lambda plan, run: run(plan),
    )


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work((cast(TrialPlan, Plan(tmp_path)),))


def test_begun_work_runs_once_and_its_task_run_gets_its_end(runner: Runner, place: SlowPlace, work: Work) -> None:
    runner.begin(work)
    assert runner.next_ended(timeout_s=0.05) is None
    place.go.set()
    (end,) = runner.run(work)
    heard = runner.next_ended(timeout_s=5)
    assert end.number == 0
    assert heard == end
    assert place.runs == 1
    assert runner.next_ended(timeout_s=0.05) is None


def test_the_same_work_runs_again_when_it_is_run_again(runner: Runner, place: SlowPlace, work: Work) -> None:
    place.go.set()
    runner.begin(work)
    runner.run(work)
    runner.run(work)
    assert place.runs == 2


def test_a_full_disk_reaches_the_task_run_and_the_caller(
    runner: Runner, place: SlowPlace, work: Work, tmp_path: Path
) -> None:
    place.error = FolderError("full")
    place.go.set()
    runner.begin(work)
    with pytest.raises(FolderError):
        runner.run(work)
    with pytest.raises(FolderError):
        runner.next_ended(timeout_s=5)


def test_waiting_for_begun_work_ends_with_it_or_with_the_time(runner: Runner, place: SlowPlace, work: Work) -> None:
    runner.await_begun(timeout_s=30)
    runner.begin(work)
    runner.await_begun(timeout_s=0.05)
    assert runner.next_ended(timeout_s=0.05) is None
    place.go.set()
    runner.await_begun(timeout_s=30)
    assert runner.next_ended(timeout_s=5) is not None


def driver_of(folder: Path, **arguments: Any) -> StudyDriver:
    """A driver of the study in a folder, new or resumed."""
    given = StudyArguments(config_path=MODEL / "deepspeed.yaml", model_dir=MODEL, method="random", **arguments)
    paths, host = StudyPaths(folder / "study"), Host("cpu", ["0"], 10 * 2**30)
    paths.trials.mkdir(parents=True, exist_ok=True)
    place = ThisHost(InstantStarter(), host, folder / "locks")
    setup = StudySetup.now("s", 0.0, read_experiment(MODEL / "deepspeed.yaml", MODEL), given, paths, host)
    return StudyDriver(setup, place, logging.getLogger("s"))


def test_a_profile_trial_that_ended_before_its_study_began_is_not_lost_and_not_run_again(tmp_path: Path) -> None:
    first = driver_of(tmp_path)
    first.begin_profile()
    first.await_begun(timeout_s=30)
    assert first.state.profile is None
    # The server did not come up, so nothing has told the driver of the end.
    resumed = driver_of(tmp_path)
    assert resumed.state.profile is not None
    resumed.begin_profile()
    assert resumed.next_ended(timeout_s=0.05) is None
    told = [event for event in HistoryReader(resumed.setup.paths.history).read() if isinstance(event, Told)]
    assert [event.number for event in told] == [0]


def test_a_study_on_a_cluster_begins_nothing_before_its_task_runs(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, ray_address="auto")
    driver.begin_profile()
    assert not driver.state.candidates
