"""A value with which the user's wrapper starts no training costs the trials with that value alone."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.operations.instant_starter import InstantStarter
from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.entrypoint import Entrypoint
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.launch.trial import ThisHost, unstarted
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import BatchSizes, ProgramProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study import followed as follow
from zerotune.trial_lib.study import program
from zerotune.trial_lib.study.arguments import StudyArguments, StudyTime
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.folder import FolderError
from zerotune.trial_lib.study.followed import Followed
from zerotune.trial_lib.study.history import Withdrawn
from zerotune.trial_lib.study.runner import Work
from zerotune.trial_lib.study.setup import StudySetup

MODEL = Path(__file__).parents[2] / "programs" / "tiny_study"
FAILED = InputError("run.sh ended (exit code 3).", where="the command", remedy="Mend it.")


@pytest.fixture
def driver(tmp_path: Path) -> StudyDriver:
    given = StudyArguments(config_path=MODEL / "deepspeed.yaml", model_dir=MODEL, method="random", max_trials=12)
    paths, host = StudyPaths(tmp_path / "study"), Host("cpu", ["0"], 10 * 2**30)
    paths.trials.mkdir(parents=True)
    place = ThisHost(InstantStarter(), host, tmp_path / "locks")
    setup = StudySetup.now("s", 0.0, read_experiment(MODEL / "deepspeed.yaml", MODEL), given, paths, host)
    driver = StudyDriver(setup, place, logging.getLogger("s"))
    for planned in (driver.profile_plan, driver.submitted_plan):
        plan = planned()
        assert plan is not None
        (end,) = driver.run(Work((plan,)))
        driver.tell(end)
    return driver


def refuse(patch: pytest.MonkeyPatch, error: Exception, fails: Callable[[int], bool] = lambda size: True) -> None:
    """Lets the wrapper of the study's command fail with some sizes."""

    def rewrapped(entrypoint: Any, path: Path, mappings: Any, config: Any, *_: object) -> Any:
        if mappings and fails(config[MICRO_BATCH]):
            raise error
        return entrypoint, mappings

    patch.setattr(program, "rewrapped", rewrapped)


def mapped(driver: StudyDriver) -> StudyDriver:
    driver.known.arg_mappings[MICRO_BATCH] = "--size"
    return driver


def test_a_value_that_the_wrapper_fails_with_is_invalid_and_the_search_goes_on(
    driver: StudyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, FAILED, lambda size: size > 1)
    mapped(driver)
    while work := driver.next_work(1):
        for end in driver.run(work[0]):
            driver.tell(end)
    searched = driver.state.of_purpose(Purpose.SEARCH)
    failed = [result for result in searched if driver.state.candidates[result.number].micro_batch_size > 1]
    assert failed
    assert {result.outcome for result in failed} == {Outcome.INVALID}
    assert all("exit code 3" in result.reason for result in failed)


def test_a_confirming_trial_that_the_wrapper_fails_with_is_invalid(
    driver: StudyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, FAILED)
    plan = mapped(driver).plan_again(Purpose.CONFIRM, Candidate(micro_batch_size=2))
    (end,) = driver.run(Work((plan,)))
    assert isinstance(end, TrialResult)
    assert (end.outcome, end.from_outside) == (Outcome.INVALID, False)
    assert plan.paths.result.exists()


def test_a_wrapper_that_takes_too_long_says_nothing_about_the_value(
    driver: StudyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, TimeoutError("run.sh has started no training within 180 s."))
    plan = mapped(driver).plan_again(Purpose.CONFIRM, Candidate(micro_batch_size=2))
    (end,) = driver.run(Work((plan,)))
    assert isinstance(end, TrialResult)
    assert (end.outcome, end.from_outside) == (Outcome.TIMED_OUT, True)


def test_a_sweep_measures_the_sizes_below_the_one_that_the_wrapper_fails_with(
    driver: StudyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, FAILED, lambda size: size >= 4)
    mapped(driver)
    candidates = tuple(Candidate(micro_batch_size=size) for size in (1, 2, 4, 8))
    plans = tuple(driver.plan_again(Purpose.SEARCH, candidate) for candidate in candidates)
    measured = []

    def run_sweep(plans: Sequence[Any], sweep: Sweep, cancelled: Any, note: Any, put: Any) -> list[Any]:
        measured.extend(plan.candidate for plan in plans)
        assert sweep.candidates == candidates[:2]
        ends = [unstarted(plan, Outcome.COMPLETED, "") for plan in plans]
        for position, end in enumerate(ends):
            put(position, end)
        return ends

    monkeypatch.setattr(driver.place, "run_sweep", run_sweep)
    ends = driver.run(Work(plans, Sweep(candidates, bytes_per_sample=0.0, headroom=0.0)))
    assert measured == list(candidates[:2])
    assert [end.number for end in ends] == [plan.number for plan in plans]
    assert isinstance(ends[2], TrialResult)
    assert ends[2].outcome is Outcome.INVALID
    assert isinstance(ends[3], Withdrawn)


@pytest.fixture
def once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a wrapper that starts nothing, for a size in the file that it reads."""

    def followed(words: Sequence[str], folder: Path, tell: Any, check: Callable[[], None] = lambda: None) -> Followed:
        for _ in range(1000):
            check()
        raise AssertionError("nothing has ended the waiting")

    monkeypatch.setattr(follow, "followed", followed)
    (tmp_path / "small.yml").write_text("micro: 4\n")
    wrapper = ("bash", "run.sh", "small.yml")
    entrypoint = Entrypoint(
        script="train.py", launcher=("python", "train.py"), arguments=("--size", "4"), wrapper=wrapper
    )
    mappings = {MICRO_BATCH: "small.yml:micro"}

    def run(*check: Callable[[], None]) -> Any:
        return follow.rewrapped(entrypoint, tmp_path / "ds.json", mappings, {MICRO_BATCH: 8}, tmp_path, *check)

    return run


def test_a_signal_or_the_end_of_the_minutes_ends_the_waiting_for_a_wrapper(once_more: Callable[..., Any]) -> None:
    for error in (KeyboardInterrupt, TimeoutError, FolderError):

        def check(error: type[BaseException] = error) -> None:
            raise error("ended")

        with pytest.raises(error, match="ended"):
            once_more(check)


def test_a_wrapper_that_starts_nothing_is_given_up(
    once_more: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_LONGEST_OF_VALUE_S", -1.0)
    with pytest.raises(TimeoutError, match="has started no training"):
        once_more()


def test_the_check_of_a_study_reaches_the_wrapper(driver: StudyDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def rewrapped(entrypoint: Any, path: Path, mappings: Any, config: Any, folder: Path, check: Any) -> Any:
        check()
        return entrypoint, mappings

    def hear() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "rewrapped", rewrapped)
    driver.plans.check = hear
    with pytest.raises(KeyboardInterrupt):
        driver.next_work(1)


@pytest.mark.parametrize("minutes", [0.0, None])
def test_the_minutes_of_a_study_end_what_waits_in_its_driver(minutes: float | None) -> None:
    study_time = StudyTime(minutes, 0.0)
    with pytest.raises(TimeoutError, match="--max-minutes") if minutes == 0.0 else contextlib.nullcontext():
        study_time.check()


def test_a_size_of_the_profile_that_the_wrapper_fails_with_is_no_error_of_the_profile(
    driver: StudyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, FAILED)
    known = mapped(driver).known.learned(ProgramProfile(typed_batch=BatchSizes(4, 4, 1)))
    plan = driver.plans.plan(0, Purpose.PROFILE, Candidate(micro_batch_size=1), known, None)
    assert plan.refused is not None
    assert plan.refused[0] is Outcome.INVALID
    # A mapping that is wrong as it is typed is an error.
    with pytest.raises(InputError, match="exit code 3"):
        driver.plans.plan(0, Purpose.PROFILE, Candidate(micro_batch_size=1), driver.known, None)
