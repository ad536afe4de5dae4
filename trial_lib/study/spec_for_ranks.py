"""The training spec of an experiment, which its ranks read: in a trial, and in a full experiment."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    CONFIG,
    DEEPSPEED_KEYS,
    MICRO_BATCH,
    OVERWRITES,
    TRAIN_BATCH,
    inline_ds_config,
)
from trial_lib.inputs.config import ExperimentConfig, Hyperparameters, Length
from trial_lib.inputs.read_experiment import Experiment
from trial_lib.messages.orders import TrainingSpec
from trial_lib.messages.secrets import redact
from trial_lib.records.folders import FullExperimentPaths, TrialPaths

# The hyperparameters in the form that training code reads, with the DeepSpeed configuration in its place.


def merged_hparams(
    hyperparameters: Hyperparameters, ds_config: Mapping[str, Any], ds_config_path: Path
) -> dict[str, Any]:
    """The hyperparameters with another complete DeepSpeed configuration, in the form of the user's.

    If the file has the key of the overwrites, it stays with an empty value, for code that reads it.
    """
    hparams = hyperparameters.as_dict()
    if OVERWRITES in hparams:
        hparams[OVERWRITES] = {}
    if inline_ds_config(hparams) is not None:
        rest = {key: value for key, value in hparams.items() if key not in DEEPSPEED_KEYS}
        return {**rest, **ds_config}
    if isinstance(hyperparameters.deepspeed_config, Mapping):
        return {**hparams, CONFIG: dict(ds_config)}
    return {**hparams, CONFIG: str(ds_config_path)}


def with_derived_batch(ds_config: Mapping[str, Any], own: Mapping[str, Any], slots: int) -> dict[str, Any]:
    """A trial's configuration for code to read, with a `train_batch_size` if the user's has one.

    ZeroTune removes it from the configuration that the code hands to DeepSpeed, because a pipeline has fewer replicas
    than slots. Here the slots are taken as the number of replicas.
    """
    micro, accumulation = ds_config.get(MICRO_BATCH), ds_config.get(ACCUMULATION, 1)
    if TRAIN_BATCH not in own or TRAIN_BATCH in ds_config or not (type(micro) is type(accumulation) is int):
        return dict(ds_config)
    return {**ds_config, TRAIN_BATCH: micro * accumulation * slots}


def trial_spec(experiment: Experiment, ds_config: Mapping[str, Any], paths: TrialPaths) -> TrainingSpec:
    """The spec of a trial's ranks. They train until the driver ends them."""
    readable = with_derived_batch(ds_config, experiment.ds_config, experiment.config.resources.slots_per_trial)
    hparams = _hparams(experiment, readable, paths.ds_config)
    return _spec(experiment, hparams, paths.tensorboard, paths.scratch)


def full_length_spec(experiment: Experiment, ds_config: Mapping[str, Any], paths: FullExperimentPaths) -> TrainingSpec:
    """The spec of a full experiment's ranks: its length, and the folders of checkpoints and metrics.

    `ds_config` is empty for code that has its own.
    """
    config = experiment.config
    hparams = _hparams(experiment, ds_config, paths.ds_config) if ds_config else config.hyperparameters.as_dict()
    return dataclasses.replace(
        _spec(experiment, hparams, paths.tensorboard, paths.scratch),
        length=_length(config.searcher.max_length),
        validation_period=_length(config.min_validation_period),
        checkpoint_period=_length(config.min_checkpoint_period),
        checkpoints=str(paths.checkpoints),
        metrics=str(paths.metrics),
        finished=str(paths.finished),
        stop=str(paths.stop),
    )


def _spec(experiment: Experiment, hparams: dict[str, Any], tensorboard: Path, scratch: Path) -> TrainingSpec:
    config = experiment.config
    return TrainingSpec(
        trial=experiment.entrypoint.trial_class,
        hparams=hparams,
        experiment_config=_shown_config(config),
        seed=config.reproducibility.experiment_seed,
        report_period=config.scheduling_unit,
        records_per_epoch=config.records_per_epoch,
        metric=config.searcher.metric,
        smaller_is_better=config.searcher.smaller_is_better,
        tensorboard=str(tensorboard),
        scratch=str(scratch),
    )


def _hparams(experiment: Experiment, ds_config: Mapping[str, Any], ds_config_path: Path) -> dict[str, Any]:
    hparams = merged_hparams(experiment.config.hyperparameters, ds_config, ds_config_path)
    if experiment.entrypoint.trial_class is None:
        # A script may read its own file by a fixed name, and merge these into it.
        hparams[OVERWRITES] = dict(ds_config)
    return hparams


def _length(length: Length | None) -> dict[str, int] | None:
    # A length for the ranks; None if there is none, and for a period of 0, which never comes.
    units: dict[str, int] = {} if length is None else length.model_dump(exclude_none=True)
    return units if any(units.values()) else None


def _shown_config(config: ExperimentConfig) -> dict[str, Any]:
    """The experiment as its code may log it, without secrets and without fields that have no effect.

    The code gets the hyperparameters separately and whole. It gets `data` only here, so `data` stays as written.
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
