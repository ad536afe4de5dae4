"""The flows of a study and of a training at full length.

A study: profile, known winner, the user's configuration, search, confirmation and reduction, report.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prefect import Flow, flow, get_run_logger, tags
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BaseModel

from zerotune.flows.flow_run import RunningStudy, finish
from zerotune.flows.interrupts import interrupts, switch_threads_often
from zerotune.flows.options import checked, shows, work_folder
from zerotune.tasks.cancellation import Waits, hear_cancellation, is_interrupt, outlive_worker
from zerotune.tasks.results import (
    Progress,
    report,
    report_training,
    show_answer,
    show_no_answer,
    tell_finding,
    tell_leader,
    tell_profile,
    tell_since_last,
    tell_start,
    train,
)
from zerotune.tasks.submit import TrialFuture, submit
from zerotune.tasks.telling import also_in_prefect, impatient_if_away, keep_secrets_from_prefect, name_run
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import FULL_EXPERIMENTS, STUDIES, StudyPaths, StudyStatus
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import MINUTES_OVER, StudyArguments
from zerotune.trial_lib.study.confirm import answer_of, holds, next_confirming_plan, next_known_plan, no_answer
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.folder import (
    INTERRUPTED,
    FinishedError,
    FolderError,
    begun_by,
    folder_error_told,
    read_record,
)
from zerotune.trial_lib.study.full_experiment import LONGEST_END_S, FullExperiment, TrainingArguments
from zerotune.trial_lib.study.open_full_experiment import (
    full_experiment_of,
    new_full_experiment,
    resume_full_experiment,
)
from zerotune.trial_lib.study.open_study import OpenStudy, new_study, require_accepted_config, resume_study
from zerotune.trial_lib.study.profile_report import had_engine, profile_failure
from zerotune.trial_lib.study.runner import ElsewhereError, Work, WorkEnd

Running = list[tuple[Work, TrialFuture]]  # running work, with its task runs


class RunFailures(NamedTuple):
    """Why a study failed, and why its full experiment did. Each is None if it did not."""

    study: str | None = None
    training: str | None = None


def _flow(name: str, model: type[BaseModel]) -> Callable[[Callable[..., State[Any]]], Flow[..., State[Any]]]:
    # Makes a flow whose parameters are the fields of a record beside the function's own.
    def made(function: Callable[..., State[Any]]) -> Flow[..., State[Any]]:
        with_fields = shows(model, derived=("zero_stages",))(function)
        options = {"task_runner": ThreadPoolTaskRunner(), "persist_result": False, "validate_parameters": True}
        return flow(name=name, **options)(with_fields)

    return made


@_flow("tune", StudyArguments)
def tune(work_dir: Path | None = None, study_dir: Path | None = None, **arguments: Any) -> State[Any]:
    """Finds the DeepSpeed configuration that trains fastest.

    Args:
        work_dir: the folder for a new study, and for its MLflow store if no other store is named.
        study_dir: the folder of a study to resume. It replaces all other parameters.
        **arguments: the fields of `StudyArguments`, for a new study.
    """
    switch_threads_often()
    outlive_worker()
    keep_secrets_from_prefect()
    try:
        study = open_study(arguments, study_dir, work_dir)
    except FinishedError as finished:
        if study_dir is not None and (flow_run.run_count or 1) == 1:
            raise
        # The study has finished, but Prefect did not record that and has retried this run.
        return completed(finished.where, read_record(StudyPaths(Path(finished.where))).regression)
    name_run(study.record.study_id, study.driver.log)
    return run_with_restarts(RunningStudy(study))


def tune_open(running: RunningStudy) -> Flow[..., State[Any]]:
    """Returns the flow `tune` of a command, which has opened its study already."""

    @_flow("tune", StudyArguments)
    def tune(work_dir: Path | None = None, study_dir: Path | None = None, **arguments: Any) -> State[Any]:
        """Tunes the study that the command has opened. Prefect only shows the parameters."""
        return run_with_restarts(running)

    return tune


def run_with_restarts(running: RunningStudy) -> State[Any]:
    """Runs a study to its end. A search that fails is resumed `max_search_runner_restarts` times."""
    restarts = running.study.driver.setup.arguments.max_search_runner_restarts
    while True:
        try:
            with also_in_prefect(running.study.driver.log):
                return run_to_its_end(running)
        except InputError:
            # The same input would be wrong again.
            raise
        except Exception:
            if restarts == 0 or interrupts.heard:
                raise
            # Prefect's retries would also repeat a study that has failed for good.
            get_run_logger().exception("The search failed and is resumed. Restarts left: %d", restarts - 1)
            restarts -= 1
            running.study = resume_study(running.study.paths.root)


def run_to_its_end(running: RunningStudy) -> State[Any]:
    running.has_begun = True
    study = running.study
    try:
        failure, running.training_failure = run_while_there_is_room(study)
        if failure:
            failure = f"{failure} {study.driver.edits.so_far()}".rstrip()
        finish(study, StudyStatus.FAILED if failure else StudyStatus.COMPLETED, failure or "")
        return (
            Failed(message=f"{study.record.finding} {failure}".lstrip())
            if failure
            else completed(str(study.paths.root), study.record.regression)
        )
    except BaseException as error:
        # Prefect delivers a cancellation to this thread only. Any error that ends the flow must end its trials.
        study.driver.cancel()
        interrupted = interrupts.heard or not isinstance(error, Exception)
        running.is_refused = isinstance(error, InputError) and not interrupted
        # The message of wrong input is for the user, and complete.
        said = str(error) if running.is_refused else f"{type(error).__name__}: {error}"
        reason = INTERRUPTED if interrupted else said
        finish(study, StudyStatus.CANCELLED if interrupted else StudyStatus.FAILED, reason)
        if interrupts.heard or is_interrupt(error):
            return Cancelled(message="Interrupted. `zerotune resume` resumes it.")
        raise
    finally:
        study.close()


def completed(root: str, regression: str) -> State[Any]:
    """Returns the state of a run whose study has completed. It is named `Regressed` if the winner has become slower."""
    return Completed(name="Regressed" if regression else "Completed", message=root)


def open_study(arguments: dict[str, Any], study_dir: Path | None, work_dir: Path | None = None) -> OpenStudy:
    """Returns the study in `study_dir`, or else the study that an earlier try of this flow run began, or a new one."""
    if study_dir is not None:
        return resume_study(study_dir)
    folder = work_folder(work_dir)
    begun = begun_by(flow_run.id, folder.glob(f"{STUDIES}/*/study.json"))
    if begun is not None:
        return resume_study(begun)
    study = new_study(checked(StudyArguments, arguments), folder, flow_run.id, get_run_logger().info)
    require_accepted_config(study)
    return study


def run_while_there_is_room(study: OpenStudy) -> RunFailures:
    """Runs a study to its end. Returns why it failed.

    It also fails if the disk is full, or if ranks run on another kind of device than their slots. It can be resumed
    when that is fixed.
    """
    try:
        with folder_error_told(study.paths.root):
            study.begin()
            return run_study(study)
    except (FolderError, ElsewhereError) as error:
        study.driver.cancel()
        return RunFailures(study=str(error))


def run_study(study: OpenStudy) -> RunFailures:
    driver = study.driver
    driver.plans.check = partial(check, driver)
    profile = driver.state.profile or run_and_insist(study, Work((driver.profile_plan(),)))
    if profile.outcome is not Outcome.COMPLETED and driver.time.is_over:
        return RunFailures(study=f"The profile trial did not end in time. {driver.time.told}")
    if profile.outcome is not Outcome.COMPLETED:
        failure = profile_failure(profile, had_engine(driver.setup, profile))
        return RunFailures(study=study.config_check.with_refusal(failure))
    study.profiled()
    tell_profile(driver)
    if driver.setup.arguments.from_earlier and not driver.state.has_searched:
        confirm_known_winner(study)
    if not driver.state.has_searched:
        submitted = None if driver.state.submitted else driver.submitted_plan()
        if submitted is not None:
            run_and_insist(study, Work((submitted,), known=driver.measured_as_typed(submitted)))
        search(study)
    if driver.ignored_batch:
        return RunFailures(study=driver.ignored_batch)
    confirm(study)
    answer = answer_of(driver)
    if answer is None:
        none = no_answer(driver)
        assert none is not None
        show_no_answer(driver, none)
        return RunFailures(study=none.reason)
    tell_since_last(driver)
    report(driver, answer, study.tracker)
    show_answer(driver, answer, study.tracker)
    return RunFailures(training=train_with_winner(study) if driver.setup.arguments.run_full_experiment else None)


def train_with_winner(study: OpenStudy) -> str | None:
    full_experiment = full_experiment_of(study)
    if full_experiment is None:
        return None
    named = experiment_open(full_experiment).with_options(flow_run_name=full_experiment.record.experiment_id)
    try:
        # The automation that detects missing heartbeats selects runs by this tag.
        with tags("zerotune"), interrupts.noting(full_experiment.interrupt, LONGEST_END_S), impatient_if_away():
            state = named(experiment_dir=full_experiment.paths.root, return_state=True)
    except httpx.HTTPError as error:
        study.driver.log.warning("Prefect has not recorded the full experiment, or not its end: %s", error)
        record = full_experiment.record
        if record.status is StudyStatus.RUNNING:
            state = run_experiment(full_experiment)
        else:
            state = Completed() if record.status is StudyStatus.COMPLETED else Failed(message=record.reason)
    finally:
        full_experiment.close()
    if state.is_cancelled():
        # The interrupt that cancelled it is this study's as well.
        raise KeyboardInterrupt
    return None if state.is_completed() else full_experiment.record.reason or str(state.message)


def run_alone(study: OpenStudy, work: Work) -> TrialResult:
    result = next_ended(study.driver, [(work, submit(study.driver, work))])
    assert isinstance(result, TrialResult)
    take_in(study, result)
    return result


def run_and_insist(study: OpenStudy, work: Work) -> TrialResult:
    """Runs one trial alone, and again if a process outside the study has killed it. The next steps need its result."""
    result = run_alone(study, work)
    return run_alone(study, Work(work.plans)) if result.from_outside and not study.driver.time.is_over else result


def confirm_known_winner(study: OpenStudy) -> None:
    """Measures the last study's winner again if nothing has changed. If its gain holds, the study needs no search."""
    driver = study.driver
    tell_start(driver)
    while not driver.time.is_over and (plan := next_known_plan(driver)) is not None:
        run_alone(study, Work((plan,)))
    if holds(driver):
        driver.stop("nothing has changed, and the known winner holds")


def search(study: OpenStudy) -> None:
    driver = study.driver
    progress = Progress(driver)
    running: Running = []
    while True:
        for work in driver.next_work(driver.setup.concurrency - len(running)):
            running.append((work, submit(driver, work)))
        progress.update()
        if not running:
            break
        take_in(study, next_ended(driver, running))
    progress.finish()
    driver.stop(MINUTES_OVER if driver.time.is_over_for_search else "the search has ended")


def confirm(study: OpenStudy) -> None:
    """Measures the best candidates and the user's configuration again, one at a time, until their gains differ. Then it
    measures the winner without some of its changes, until those are left that its gain needs.
    """
    driver = study.driver
    tell_leader(driver)
    while not driver.time.is_over and (plan := next_confirming_plan(driver)) is not None:
        run_alone(study, Work((plan,)))
    tell_finding(driver)


def next_ended(driver: StudyDriver, running: Running) -> WorkEnd:
    """Waits for a trial to end. Removes its work from the list if it was the work's last trial."""
    waits = Waits(driver.setup.paths, driver.log, driver.state.label)
    while True:
        end = driver.next_ended(timeout_s=0.5)
        # First, because the result of an interrupted trial must not be used.
        hear_interrupts(driver)
        waits.tell([] if end is not None else [number for work, _ in running for number in work.numbers])
        if end is not None:
            for work, future in running:
                if end.number == work.numbers[-1]:
                    future.wait()
                    running.remove((work, future))
                    break
            return end
        for work, future in running:
            # A failure of Prefect's costs this work only.
            if future.wrapped_future.done():
                driver.lose(work, f"Its Prefect task run ended: {future.state}")


def hear_interrupts(driver: StudyDriver) -> None:
    interrupts.check()
    hear_cancellation(driver.log.warning)


def check(driver: StudyDriver) -> None:
    """Ends the waiting for the user's wrapper, if the study ends or its minutes are over."""
    hear_interrupts(driver)
    driver.history.check()
    driver.time.check()


def take_in(study: OpenStudy, end: WorkEnd) -> None:
    """Records how a trial ended, in the study and in MLflow.
    Raises ElsewhereError: its ranks ran on another kind of device than its slots.
    """
    study.driver.tell(end)
    if isinstance(end, TrialResult) and end.elsewhere:
        raise ElsewhereError(end.reason)
    if end.number in study.driver.state.results:
        study.tracker.notify()


# The full experiment: the user's training at full length.


@_flow("experiment", TrainingArguments)
def experiment(work_dir: Path | None = None, experiment_dir: Path | None = None, **arguments: Any) -> State[Any]:
    """Trains at full length.

    Args:
        work_dir: the folder for a new full experiment, and for its MLflow store if no other store is named.
        experiment_dir: the folder of a full experiment to resume. It replaces all other parameters.
        **arguments: the fields of `TrainingArguments`, for a new full experiment.
    """
    outlive_worker()
    keep_secrets_from_prefect()
    try:
        full_experiment = open_experiment(arguments, experiment_dir, work_dir)
    except FinishedError as finished:
        if experiment_dir is not None:
            raise
        # The training has finished, but Prefect did not record that and has retried this run.
        return Completed(message=finished.where)
    name_run(full_experiment.record.experiment_id, full_experiment.log)
    return run_experiment(full_experiment)


def experiment_open(full_experiment: FullExperiment) -> Flow[..., State[Any]]:
    """Returns the flow `experiment` for a full experiment that its command or its study has opened already."""

    @_flow("experiment", TrainingArguments)
    def experiment(work_dir: Path | None = None, experiment_dir: Path | None = None, **arguments: Any) -> State[Any]:
        """Trains at full length. Prefect only shows the parameters."""
        return run_experiment(full_experiment)

    return experiment


def run_experiment(full_experiment: FullExperiment) -> State[Any]:
    with also_in_prefect(full_experiment.log):
        return _run_experiment(full_experiment)


def _run_experiment(full_experiment: FullExperiment) -> State[Any]:
    try:
        full_experiment.begin()
        end = train(full_experiment)
        report_training(full_experiment)
        return Completed(message=str(full_experiment.paths.root)) if end.completed else Failed(message=end.reason)
    except BaseException as error:
        # Prefect delivers a cancellation to this thread only. Any error that ends the flow must end the training.
        full_experiment.stop()
        interrupted = interrupts.heard or not isinstance(error, Exception)
        reason = INTERRUPTED if interrupted else f"{type(error).__name__}: {error}"
        full_experiment.finish(StudyStatus.CANCELLED if interrupted else StudyStatus.FAILED, reason)
        if interrupts.heard or is_interrupt(error):
            return Cancelled(message="Interrupted. It can be resumed.")
        raise
    finally:
        full_experiment.close()


def open_experiment(
    arguments: dict[str, Any], experiment_dir: Path | None, work_dir: Path | None = None
) -> FullExperiment:
    """Returns the full experiment in `experiment_dir`, the one that an earlier try of this run began, or a new one."""
    if experiment_dir is not None:
        return resume_full_experiment(experiment_dir)
    folder = work_folder(work_dir)
    begun = begun_by(flow_run.id, folder.glob(f"{FULL_EXPERIMENTS}/*/record.json"))
    if begun is not None:
        return resume_full_experiment(begun)
    return new_full_experiment(checked(TrainingArguments, arguments), folder, flow_run.id)
