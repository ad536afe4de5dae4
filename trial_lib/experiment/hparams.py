"""The hyperparameters as training code reads them, and where the DeepSpeed configuration stands in them.

It may be a file that `deepspeed_config` names, a mapping there, or DeepSpeed's own keys among the other
hyperparameters; `overwrite_deepspeed_args` is merged into it.
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
    """Returns the hyperparameters with another DeepSpeed configuration in the place of the user's, in its form.

    Args:
        hyperparameters: the experiment's.
        ds_config: the complete configuration to train with: the user's overwrites are in it, so that none is left to
            merge; their key stays, empty, where the file has it, for code that reads it.
        ds_config_path: the file that it stands in.
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
    """Returns a trial's configuration for code to read: with a `train_batch_size` if the user's configuration has one.

    What the code hands to DeepSpeed is stripped of it again: a pipeline has fewer replicas than slots.

    Args:
        ds_config: the trial's configuration, which may leave it to DeepSpeed.
        own: the user's.
        slots: devices that train together, taken for the replicas that it follows from.
    """
    micro, accumulation = ds_config.get(MICRO_BATCH), ds_config.get(ACCUMULATION, 1)
    if TRAIN_BATCH not in own or TRAIN_BATCH in ds_config or not (type(micro) is type(accumulation) is int):
        return dict(ds_config)
    return {**ds_config, TRAIN_BATCH: micro * accumulation * slots}
