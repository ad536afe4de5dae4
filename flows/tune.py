"""The tuning flow: profile, the submitted configuration, search, report."""

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner

from flows.experiment import experiment
from tasks.profile import tell_profile
from tasks.progress import Progress
from tasks.report import report
from tasks.trial import TrialFuture, submit
from trial_lib.experiment.result import Outcome, TrialResult
from trial_lib.experiment.study import StudyStatus
from trial_lib.launch.trial import TrialPlan, unstarted
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.driver import StudyDriver
from trial_lib.study.open_full_experiment import full_experiment_of
from trial_lib.study.open_study import OpenStudy, new_study, resume_study
from trial_lib.study.profile_report import profile_failure

Running = dict[int, tuple[TrialPlan, TrialFuture]]
"""The trials that run, by their numbers."""


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
    best = driver.best
    if best is None or driver.ignored_batch is not None:
        return driver.ignored_batch or "No trial completed."
    report(driver, best, study.tracker.run_url)
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
    running = {plan.number: (plan, submit(study.driver, plan))}
    result = next_result(study.driver, running)
    take_in(study, result)
    return result


def search(study: OpenStudy) -> None:
    """Runs the search to its end, up to `concurrency` trials at once."""
    driver = study.driver
    progress = Progress(driver)
    running: Running = {}
    while True:
        for plan in driver.next_plans(driver.concurrency - len(running)):
            running[plan.number] = (plan, submit(driver, plan))
        progress.update()
        if not running:
            break
        take_in(study, next_result(driver, running))
    driver.stop("the search has ended")


def next_result(driver: StudyDriver, running: Running) -> TrialResult:
    """Waits for one of the running trials to end, and takes it out of them."""
    while True:
        result = driver.next_result(timeout_s=0.5)
        if result is None:
            result = next(
                (lost for plan, future in running.values() if (lost := lost_trial(driver, plan, future))), None
            )
        if result is not None:
            _, future = running.pop(result.number)
            future.wait()
            return result


def lost_trial(driver: StudyDriver, plan: TrialPlan, future: TrialFuture) -> TrialResult | None:
    """Returns the result of a trial whose task run ended without running it: Prefect's failure costs that trial."""
    if not future.wrapped_future.done():
        return None
    return driver.next_result(timeout_s=0.0) or unstarted(plan, Outcome.CRASHED, f"Its task run ended: {future.state}")


def take_in(study: OpenStudy, result: TrialResult) -> None:
    """Remembers how a trial ended, and sends it on."""
    study.driver.tell(result)
    study.tracker.notify()
