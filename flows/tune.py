"""The tuning flow: profile, the known winner, the submitted configuration, search, confirm, report."""

from pathlib import Path
from typing import Any

import httpx
from prefect import flow, get_run_logger, tags
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner

from flows.ending import finish
from flows.experiment import experiment
from flows.interrupts import interrupts
from flows.parameters import checked, shows, work_folder
from tasks.cancellation import hear_cancellation, is_interrupt, outlive_worker
from tasks.confirm import tell_finding
from tasks.known_winner import tell_since_last, tell_start
from tasks.profile import tell_profile
from tasks.progress import Progress
from tasks.report import report
from tasks.submit import TrialFuture, submit
from tasks.telling import impatient_if_away
from tasks.without_secrets import keep_secrets_from_prefect
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.result import Outcome, TrialResult
from trial_lib.experiment.study import STUDIES, StudyPaths, StudyStatus
from trial_lib.launch.trial import TrialPlan
from trial_lib.study.accepted_config import require_accepted_config
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.confirming import answer_of, next_confirming_plan, no_answer
from trial_lib.study.disk_room import DiskFullError, disk_full_told
from trial_lib.study.driver import StudyDriver
from trial_lib.study.earlier_studies import record_of
from trial_lib.study.folder import INTERRUPTED, FinishedError, begun_by
from trial_lib.study.full_experiment import LONGEST_END_S
from trial_lib.study.interrupted import ElsewhereError
from trial_lib.study.known_winner import holds, next_known_plan
from trial_lib.study.open_full_experiment import full_experiment_of
from trial_lib.study.open_study import OpenStudy, new_study, resume_study
from trial_lib.study.profile_report import profile_failure
from trial_lib.study.runner import Ended, Work

Running = list[tuple[Work, TrialFuture]]
"""The work that runs, with its task runs."""


@flow(name="tune", task_runner=ThreadPoolTaskRunner(), persist_result=False, validate_parameters=True)
@shows(StudyArguments, derived=("zero_stages",))
def tune(work_dir: Path | None = None, study_dir: Path | None = None, **arguments: Any) -> State[Any]:
    """Finds the DeepSpeed configuration that trains fastest.

    Args:
        work_dir: the folder that a new study is written in, and its MLflow store where no other is named.
        study_dir: the folder of a study to go on with, in the place of all other parameters.
        **arguments: of a new study: the fields of `StudyArguments`.
    """
    outlive_worker()
    keep_secrets_from_prefect()
    try:
        study = open_study(arguments, study_dir, work_dir)
    except FinishedError as finished:
        if study_dir is not None and (flow_run.run_count or 1) == 1:
            raise
        # This run was retried although nothing of its study is left to do: Prefect had not heard of its end.
        record = record_of(StudyPaths(Path(finished.where)))
        return completed(finished.where, "" if record is None else record.regression)
    restarts = study.driver.arguments.max_search_runner_restarts
    while True:
        try:
            return run_to_its_end(study)
        except InputError:
            # It would be wrong again.
            raise
        except Exception:
            if restarts == 0 or interrupts.heard:
                raise
            # Not by Prefect's retries: those would also repeat a study that has failed for good.
            get_run_logger().exception("The search failed, and goes on where it was; restarts left: %d", restarts - 1)
            restarts -= 1
            study = resume_study(study.paths.root)


def run_to_its_end(study: OpenStudy) -> State[Any]:
    """Runs an open study and closes it, however it ends; returns the flow's state."""
    try:
        failure = run_while_there_is_room(study)
        if failure:
            failure = f"{failure} {study.driver.edited}".rstrip()
        finish(study, StudyStatus.FAILED if failure else StudyStatus.COMPLETED, failure or "")
        return Failed(message=failure) if failure else completed(str(study.paths.root), study.record.regression)
    except BaseException as error:
        # Prefect delivers a cancellation to this thread alone: whatever ends the flow ends its trials' processes.
        study.driver.cancel()
        interrupted = interrupts.heard or not isinstance(error, Exception)
        reason = INTERRUPTED if interrupted else f"{type(error).__name__}: {error}"
        finish(study, StudyStatus.CANCELLED if interrupted else StudyStatus.FAILED, reason)
        if interrupts.heard or is_interrupt(error):
            return Cancelled(message="Interrupted; `zerotune resume` goes on with it.")
        raise
    finally:
        study.close()


def completed(root: str, regression: str) -> State[Any]:
    """Returns the state of a run whose study has completed; its name tells a winner that has become slower."""
    return Completed(name="Regressed" if regression else "Completed", message=root)


def open_study(arguments: dict[str, Any], study_dir: Path | None, work_dir: Path | None = None) -> OpenStudy:
    """Returns the study that the command has opened already, an interrupted one, or a new one.

    A flow run that is retried goes on with the study that it has begun.
    """
    if study_dir is not None:
        return resume_study(study_dir)
    folder = work_folder(work_dir)
    begun = begun_by(flow_run.id, folder.glob(f"{STUDIES}/*/study.json"))
    if begun is not None:
        return resume_study(begun)
    study = new_study(checked(StudyArguments, arguments), folder, flow_run.id, get_run_logger().info)
    require_accepted_config(study)
    return study


def run_while_there_is_room(study: OpenStudy) -> str | None:
    """Begins a study, or goes on with it, to its end; returns why it failed, or None.

    A full disk, and ranks that come to another kind of device than the slots are, end it as well: once that is mended,
    the study goes on.
    """
    try:
        with disk_full_told(study.paths.root):
            study.begin()
            return run_study(study)
    except (DiskFullError, ElsewhereError) as error:
        study.driver.cancel()
        return str(error)


def run_study(study: OpenStudy) -> str | None:
    """Runs what is left of a study; returns why it failed, or None."""
    driver = study.driver
    profile = driver.profile or run_and_insist(study, driver.profile_plan())
    if profile.outcome is not Outcome.COMPLETED:
        return profile_failure(profile, driver.had_engine(profile))
    study.profiled()
    tell_profile(driver)
    if driver.arguments.from_earlier and not driver.has_searched:
        confirm_known_winner(study)
    if not driver.has_searched:
        submitted = None if driver.submitted else driver.submitted_plan()
        if submitted is not None:
            run_and_insist(study, submitted)
        search(study)
    if driver.ignored_batch is not None:
        return driver.ignored_batch
    confirm(study)
    answer = answer_of(driver)
    if answer is None:
        return no_answer(driver)
    tell_since_last(driver)
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
    root = full_experiment.paths.root
    try:
        # The automation that misses runs without a heartbeat looks for it.
        with tags("zerotune"), interrupts.noting(full_experiment.interrupt, LONGEST_END_S), impatient_if_away():
            state = named(experiment_dir=root, return_state=True)
    except httpx.HTTPError as error:
        study.driver.log.warning("Prefect has no run of the full experiment, or not its end: %s", error)
        record = full_experiment.record
        if record.status is StudyStatus.RUNNING:
            state = experiment.fn(experiment_dir=root)
        else:
            state = Completed() if record.status is StudyStatus.COMPLETED else Failed(message=record.reason)
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


def run_and_insist(study: OpenStudy, plan: TrialPlan) -> TrialResult:
    """Runs one trial while no other does, and once more where somebody has killed it: what follows stands on it."""
    result = run_alone(study, plan)
    return run_alone(study, plan) if result.from_outside else result


def confirm_known_winner(study: OpenStudy) -> None:
    """Where nothing has changed, measures the last study's winner again; one that holds is the answer: no search."""
    driver = study.driver
    tell_start(driver)
    while (plan := next_known_plan(driver)) is not None:
        run_alone(study, plan)
    if holds(driver):
        driver.stop("nothing has changed, and the known winner holds")


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
    progress.finish()
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
        # First: how a trial ended that was cut short is no answer.
        interrupts.check()
        if end is not None:
            leave(running, end.number)
            return end
        hear_cancellation()
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
    """Remembers how a trial ended, and sends it on.

    Raises:
        ElsewhereError: its ranks came to another kind of device than its slots are.
    """
    study.driver.tell(end)
    if isinstance(end, TrialResult) and end.elsewhere:
        raise ElsewhereError(end.reason)
    if end.number in study.driver.results:
        study.tracker.notify()
