"""A whole study in this process, without Prefect and MLflow: the order of work is the flow's, one trial at a time."""

from collections.abc import Callable
from pathlib import Path

from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.best_command import write_answer
from zerotune.trial_lib.study.confirm import Answer, answer_of, next_confirming_plan, no_answer
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.open_study import OpenStudy, new_study
from zerotune.trial_lib.study.profile_report import had_engine, profile_failure
from zerotune.trial_lib.study.runner import Work


class StudyFailedError(Exception):
    """A study has no answer; its message says why."""


def open_study(arguments: StudyArguments, folder: Path) -> OpenStudy:
    """Returns a new study; its folder is in `folder`."""
    return new_study(arguments, folder)


def run(driver: StudyDriver, work: Work) -> list[TrialResult]:
    """Runs one piece of work to its end and tells the study; returns what was measured."""
    ends = driver.run(work)
    for _ in ends:
        end = driver.next_ended(timeout_s=0.0)
        assert end is not None
        driver.tell(end)
    return [end for end in ends if isinstance(end, TrialResult)]


def run_alone(driver: StudyDriver, plan: TrialPlan) -> TrialResult:
    """Runs one trial to its end."""
    (result,) = run(driver, Work((plan,)))
    return result


def run_to_answer(study: OpenStudy, tell: Callable[[], None] = lambda: None) -> Answer:
    """Runs a study to its answer, and writes that into the study's folder.

    Args:
        study: a new one.
        tell: called after each piece of work.

    Raises:
        StudyFailedError: it has none.
    """
    driver = study.driver
    profile = run_alone(driver, driver.profile_plan())
    tell()
    if profile.outcome is not Outcome.COMPLETED:
        raise StudyFailedError(profile_failure(profile, had_engine(driver.setup, profile)))
    submitted = driver.submitted_plan()
    if submitted is not None:
        run_alone(driver, submitted)
    while pieces := driver.next_work(1):
        for work in pieces:
            run(driver, work)
            tell()
    driver.stop("the search has ended")
    while (plan := next_confirming_plan(driver)) is not None:
        run_alone(driver, plan)
        tell()
    answer = answer_of(driver)
    if answer is None:
        raise StudyFailedError(no_answer(driver))
    write_answer(driver, answer)
    return answer
