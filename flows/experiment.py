"""The full experiment: the user's training at full length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import Flow, flow
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State

from flows.interrupts import interrupts
from flows.options import checked, shows, work_folder
from tasks.cancellation import is_interrupt, outlive_worker
from tasks.results import report_training, train
from tasks.telling import keep_secrets_from_prefect
from trial_lib.records.folders import FULL_EXPERIMENTS, StudyStatus
from trial_lib.study.folder import INTERRUPTED, FinishedError, begun_by
from trial_lib.study.full_experiment import FullExperiment, TrainingArguments
from trial_lib.study.open_full_experiment import new_full_experiment, resume_full_experiment


def _flow(function: Callable[..., State[Any]]) -> Flow[..., State[Any]]:
    return flow(name="experiment", persist_result=False, validate_parameters=True)(shows(TrainingArguments)(function))


@_flow
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
    return run_experiment(full_experiment)


def experiment_open(full_experiment: FullExperiment) -> Flow[..., State[Any]]:
    """Returns the flow `experiment` for a full experiment that its command or its study has opened already."""

    @_flow
    def experiment(work_dir: Path | None = None, experiment_dir: Path | None = None, **arguments: Any) -> State[Any]:
        """Trains at full length. Prefect only shows the parameters."""
        return run_experiment(full_experiment)

    return experiment


def run_experiment(full_experiment: FullExperiment) -> State[Any]:
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
