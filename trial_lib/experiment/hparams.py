"""The hyperparameters in the form that training code reads, with the DeepSpeed configuration in its place.

The place may be a file that `deepspeed_config` names, a mapping there, or DeepSpeed's own keys among the other
hyperparameters. `overwrite_deepspeed_args` is merged into it.
"""

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
from trial_lib.experiment.config import Hyperparameters


def merged_hparams(
    hyperparameters: Hyperparameters, ds_config: Mapping[str, Any], ds_config_path: Path
) -> dict[str, Any]:
    """Returns the hyperparameters with another DeepSpeed configuration, in the form of the user's.

    Args:
        hyperparameters: the experiment's.
        ds_config: the complete configuration to train with, the user's overwrites included. If the file has the key of
            the overwrites, it stays with an empty value, for code that reads it.
        ds_config_path: the file of that configuration.
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
    """Returns a trial's configuration for code to read. It has a `train_batch_size` if the user's configuration has
    one.

    ZeroTune removes it from the configuration that the code hands to DeepSpeed, because a pipeline has fewer replicas
    than slots.

    Args:
        ds_config: the trial's configuration, possibly without it.
        own: the user's.
        slots: devices that train together, taken as the number of replicas.
    """
    micro, accumulation = ds_config.get(MICRO_BATCH), ds_config.get(ACCUMULATION, 1)
    if TRAIN_BATCH not in own or TRAIN_BATCH in ds_config or not (type(micro) is type(accumulation) is int):
        return dict(ds_config)
    return {**ds_config, TRAIN_BATCH: micro * accumulation * slots}
