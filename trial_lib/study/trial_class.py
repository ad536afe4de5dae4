"""An experiment whose entrypoint is a trial class: what its ranks are told."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.experiment.config import ExperimentConfig
from trial_lib.experiment.environment import redact
from trial_lib.experiment.hparams import merged_hparams
from trial_lib.experiment.training_spec import TrainingSpec
from trial_lib.experiment.yaml_file import Experiment


def tuning_spec(
    experiment: Experiment, ds_config: Mapping[str, Any], ds_config_path: Path, tensorboard: Path
) -> TrainingSpec | None:
    """Returns what the ranks of a trial are told: to train until they are ended; None where they run no trial class.

    Args:
        experiment: what the user submitted.
        ds_config: the complete DeepSpeed configuration of the trial.
        ds_config_path: the file that it stands in.
        tensorboard: the folder for TensorBoard's files.
    """
    if experiment.entrypoint.trial_class is None:
        return None
    config = experiment.config
    return TrainingSpec(
        trial=experiment.entrypoint.trial_class,
        hparams=merged_hparams(config.hyperparameters, ds_config, ds_config_path),
        experiment_config=_shown_config(config),
        seed=config.reproducibility.experiment_seed,
        report_period=config.scheduling_unit,
        records_per_epoch=config.records_per_epoch,
        metric=config.searcher.metric,
        smaller_is_better=config.searcher.smaller_is_better,
        tensorboard=str(tensorboard),
    )


def _shown_config(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the experiment as its code may log it: without secrets, and without the fields that have no effect.

    Hyperparameters come to the code whole beside it; `data` comes by it alone, and so is as it is written.
    """
    whole = config.model_dump(mode="json", exclude_unset=True)
    for dotted in config.not_used():
        *sections, name = dotted.split(".")
        section = whole
        for key in sections:
            section = section[key]
        del section[name]
    shown = redact(whole)
    if "data" in whole:
        shown["data"] = whole["data"]
    return shown
