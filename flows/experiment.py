"""The full experiment: the user's training at full length."""

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.states import Cancelled, Completed, Failed, State

from tasks.experiment import report_training, train
from trial_lib.experiment.study import StudyStatus
from trial_lib.study.full_experiment import FullExperiment, TrainingArguments
from trial_lib.study.open_full_experiment import new_full_experiment, resume_full_experiment


@flow(name="experiment", persist_result=False, validate_parameters=True)
def experiment(arguments: TrainingArguments | None = None, experiment_dir: Path | None = None) -> State[Any]:
    """Trains at full length.

    Args:
        arguments: of a new full experiment.
        experiment_dir: the folder of one to go on with, in the place of arguments.
    """
    full_experiment = open_experiment(arguments, experiment_dir)
    try:
        full_experiment.begin()
        end = train(full_experiment)
        report_training(full_experiment)
        return Completed(message=str(full_experiment.paths.root)) if end.completed else Failed(message=end.reason)
    except BaseException as error:
        # Prefect delivers a cancellation to this thread alone: whatever ends the flow ends the training's processes.
        full_experiment.stop()
        interrupted = not isinstance(error, Exception)
        full_experiment.finish(
            StudyStatus.CANCELLED if interrupted else StudyStatus.FAILED, f"{type(error).__name__}: {error}"
        )
        if isinstance(error, KeyboardInterrupt):
            return Cancelled(message="Interrupted; it can be gone on with.")
        raise
    finally:
        full_experiment.close()


def open_experiment(arguments: TrainingArguments | None, experiment_dir: Path | None) -> FullExperiment:
    """Returns the full experiment that the command or a study has opened already, an interrupted one, or a new one."""
    if experiment_dir is not None:
        return resume_full_experiment(experiment_dir)
    if arguments is None:
        raise ValueError("give either the arguments of a new full experiment or the folder of one to go on with")
    return new_full_experiment(arguments, Path.cwd())
