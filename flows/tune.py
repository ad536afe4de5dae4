"""The tuning flow: profile, the submitted configuration, search, confirm, report."""

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner

from flows.experiment import experiment
from tasks.confirm import tell_finding
from tasks.profile import tell_profile
from tasks.progress import Progress
from tasks.report import report
from tasks.trial import TrialFuture, submit
from trial_lib.experiment.result import Outcome, TrialResult
from trial_lib.experiment.study import StudyStatus
from trial_lib.launch.trial import TrialPlan
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.confirming import answer_of, next_confirming_plan, no_answer
from trial_lib.study.driver import StudyDriver
from trial_lib.study.open_full_experiment import full_experiment_of
from trial_lib.study.open_study import OpenStudy, new_study, resume_study
from trial_lib.study.profile_report import profile_failure
from trial_lib.study.runner import Ended, Work

Running = list[tuple[Work, TrialFuture]]
"""The work that runs, with its task runs."""


@flow(name="tune", task_runner=ThreadPoolTaskRunner(), persist_result=False, validate_parameters=True)
def tune(arguments: StudyArguments | None = None, study_dir: Path | None = None) -> State[Any]:
    """Finds the DeepSpeed configuration that trains fastest.

    Args:
        arguments: of a new study.
        study_dir: the folder of a study to go on with, in the place of arguments.
    """
    study = open_study(arguments, study_dir)
    restarts = study.driver.arguments.max_search_runner_restarts
    while True:
        try:
            return run_to_its_end(study)
        except Exception:
            if restarts == 0:
                raise
            # Not by Prefect's retries: those would also repeat a study that has failed for good.
            get_run_logger().exception("The search failed, and goes on where it was; restarts left: %d", restarts - 1)
            restarts -= 1
            study = resume_study(study.paths.root)


def run_to_its_end(study: OpenStudy) -> State[Any]:
    """Runs an open study and closes it, however it ends; returns the flow's state."""
    try:
        study.begin()
        failure = run_study(study)
        study.finish(StudyStatus.FAILED if failure else StudyStatus.COMPLETED, failure or "")
        return Failed(message=failure) if failure else Completed(message=str(study.paths.root))
    except BaseException as error:
        # Prefect delivers a cancellation to this thread alone: whatever ends the flow ends its trials' processes.
        study.driver.cancel()
        interrupted = not isinstance(error, Exception)
        study.finish(StudyStatus.CANCELLED if interrupted else StudyStatus.FAILED, f"{type(error).__name__}: {error}")
        if isinstance(error, KeyboardInterrupt):
            return Cancelled(message="Interrupted; `zerotune resume` goes on with it.")
        raise
    finally:
        study.close()


def open_study(arguments: StudyArguments | None, study_dir: Path | None) -> OpenStudy:
    """Returns the study that the command has opened already, an interrupted one, or a new one."""
    if study_dir is not None:
        return resume_study(study_dir)
    if arguments is None:
        raise ValueError("give either the arguments of a new study or the folder of one to go on with")
    return new_study(arguments, Path.cwd())


def run_study(study: OpenStudy) -> str | None:
    """Runs what is left of a study; returns why it failed, or None."""
    driver = study.driver
    profile = driver.profile or run_alone(study, driver.profile_plan())
    if profile.outcome is not Outcome.COMPLETED:
        return profile_failure(profile, driver.had_engine(profile), driver.arg_mappings)
    tell_profile(driver)
    if driver.contradiction is not None:
        return driver.contradiction
    if not driver.has_searched:
        submitted = None if driver.submitted else driver.submitted_plan()
        if submitted is not None:
            run_alone(study, submitted)
        search(study)
    if driver.ignored_batch is not None:
        return driver.ignored_batch
    confirm(study)
    answer = answer_of(driver)
    if answer is None:
        return no_answer(driver)
    report(driver, answer, study.tracker.run_url)
    if driver.arguments.run_full_experiment:
        train_with_winner(study)
    return None


def train_with_winner(study: OpenStudy) -> None:
    """Trains at full length with the winning configuration, as a flow within this one; notes where that failed."""
    full_experiment = full_experiment_of(study)
    if full_experiment is None:
        return
    named = experiment.with_options(flow_run_name=full_experiment.record.experiment_id)
    try:
        state = named(experiment_dir=full_experiment.paths.root, return_state=True)
    finally:
        full_experiment.close()
    if state.is_cancelled():
        # It has heard the interrupt, which is this study's as well.
        raise KeyboardInterrupt
    if not state.is_completed():
        study.driver.full_experiment_failure = full_experiment.record.reason or str(state.message)


def run_alone(study: OpenStudy, plan: TrialPlan) -> TrialResult:
    """Runs one trial while no other does."""
    work = Work((plan,))
    running = [(work, submit(study.driver, work))]
    result = next_ended(study.driver, running)
    assert isinstance(result, TrialResult)
    take_in(study, result)
    return result


def search(study: OpenStudy) -> None:
    """Runs the search to its end, up to `concurrency` process groups at once."""
    driver = study.driver
    progress = Progress(driver)
    running: Running = []
    while True:
        for work in driver.next_work(driver.concurrency - len(running)):
            running.append((work, submit(driver, work)))
        progress.update()
        if not running:
            break
        take_in(study, next_ended(driver, running))
    driver.stop("its minutes are over" if driver.minutes_are_over else "the search has ended")


def confirm(study: OpenStudy) -> None:
    """Measures the best few and the user's own configuration again, one at a time, until they have parted."""
    driver = study.driver
    while (plan := next_confirming_plan(driver)) is not None:
        run_alone(study, plan)
    tell_finding(driver)


def next_ended(driver: StudyDriver, running: Running) -> Ended:
    """Waits for a trial of the running work to end; work whose last one it was is taken out."""
    while True:
        end = driver.next_ended(timeout_s=0.5)
        if end is not None:
            leave(running, end.number)
            return end
        for work, future in running:
            # Prefect's own failure costs that work, and nothing else.
            if future.wrapped_future.done():
                driver.lose(work, f"Its task run ended: {future.state}")


def leave(running: Running, number: int) -> None:
    """Takes work out whose last trial has ended with this number; its task run is waited for."""
    for work, future in running:
        if number == work.numbers[-1]:
            future.wait()
            running.remove((work, future))
            return


def take_in(study: OpenStudy, end: Ended) -> None:
    """Remembers how a trial ended, and sends it on."""
    study.driver.tell(end)
    study.tracker.notify()
